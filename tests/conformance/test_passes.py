"""Every pass keeps the results: over all conformance cases, with each pass that does something switched off in turn.

A pass that reports no change on a case left its graph as it was, so on and off are the same there.
"""

from __future__ import annotations

import pytest

import ranvier as rv
from tests.conformance.cases import WAITING, Case, all_cases, check

CASES = [case for case in all_cases() if case.name not in WAITING]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_active_pass_off(case: Case) -> None:
    model = case.model()
    with rv.load(model, optimization="aggressive", debug=1) as session:  # debug: the graph is verified after each pass
        active = dict.fromkeys(step.name for step in session.report.passes if step.changes)
    for name in active:
        with rv.load(model, optimization="aggressive", disabled_passes=(name,)) as session:
            for inputs, expected in case.data(model):
                check(list(session.run(inputs).values()), expected, case)
