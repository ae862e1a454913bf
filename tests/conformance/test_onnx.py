"""The standard's own test suite, through the normal session: with full optimization and with none, and with generated
code for every instruction set that this machine can run."""

from __future__ import annotations

import pytest

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.formats import onnx as onnx_format
from tests.conformance.cases import WAITING, Case, all_cases, check

CASES = all_cases()
# the best one is what every other test runs
OTHER_SETS = [each.name for each in isa.available() if each.name != isa.host().name]


def _parameters() -> list:
    def marks(case: Case) -> list:
        reason = WAITING.get(case.name)
        return [pytest.mark.xfail(reason=reason, strict=True)] if reason else []

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES]


def test_no_case_is_missing() -> None:
    counts: dict[str, int] = {}
    for case in CASES:
        counts[case.kind] = counts.get(case.kind, 0) + 1
    assert counts["node"] >= 1878
    assert (counts["simple"], counts["pytorch-converted"], counts["pytorch-operator"], counts["light"]) == (
        23,
        82,
        35,
        9,
    )


@pytest.mark.parametrize("level", ["none", "aggressive"])
@pytest.mark.parametrize("case", _parameters())
def test_case(case: Case, level: str) -> None:
    model = case.model()
    with rv.load(model, optimization=level) as session:
        for inputs, expected in case.data(model):
            check(list(session.run(inputs).values()), expected, case)


@pytest.mark.parametrize("name", OTHER_SETS)
@pytest.mark.parametrize("case", _parameters())
def test_other_instruction_sets(case: Case, name: str) -> None:
    model = case.model()
    with rv.load(model, optimization="none", provider_options={"cpu": {"isa": name}}) as session:
        if not any(node.provider == "cpu" for node in session.report.nodes):
            return  # nothing is generated, and test_case runs it
        for inputs, expected in case.data(model):
            check(list(session.run(inputs).values()), expected, case)


@pytest.mark.parametrize("case", _parameters())
def test_export_and_load_again(case: Case) -> None:
    model = case.model()
    exported = onnx_format.to_proto(onnx_format.read(model))
    with rv.load(exported.SerializeToString(), optimization="none") as session:
        for inputs, expected in case.data(model):
            check(list(session.run(inputs).values()), expected, case)
