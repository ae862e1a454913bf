"""When parts of the host run at the same time: where that saves enough by what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.providers.cpu.kernel import CpuKernel
from ranvier.runtime import beside
from ranvier.runtime.calibration.model import MachineCosts
from ranvier.runtime.report import report_for
from ranvier.runtime.session import Session
from tests.runtime.test_waves import X, config_of, two_branches


def costs(monkeypatch: pytest.MonkeyPatch, fast: float, slow: float) -> None:
    """Seconds of every node on the CPU provider and on the reference; nothing is measured."""
    monkeypatch.setenv("RANVIER_CALIBRATE", "off")
    monkeypatch.setattr(beside, "_enough", lambda found: True)
    monkeypatch.setattr(MachineCosts, "node_seconds", lambda self, node, who: fast if who.name == "cpu" else slow)


BY_COST = {"policy": "cost", "pins": {"a*": "reference"}, "threads": 2}


def test_waves_are_chosen_where_they_save_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, 2e-3, 4e-3)
    with Session(two_branches(), config_of(**BY_COST)) as session:
        parts = session.report.parts
        assert [(part.provider, part.wave, part.lane, part.threads) for part in parts] == [
            *[("reference", 0, 0, 1)] * 3,
            ("cpu", 0, 1, 1),
            ("cpu", -1, 0, 0),
        ]
        told = [
            "at the same time: reference a0 +2 (1 thread, 12 ms) | cpu b0 +2 (1 thread, 12 ms)",
            "20 ms are predicted for one after the other",
        ]
        assert session.report.together() == told
        assert all(text in str(session.report) for text in told)
        assert session.report.predicted is not None
        assert session.report.predicted.seconds == pytest.approx(14e-3, rel=0.02)  # instead of 20
        again = report_for(session, {}).predicted
        assert again is not None and again.seconds == pytest.approx(session.report.predicted.seconds)
        kernel = session._parts[3].kernel
        assert isinstance(kernel, CpuKernel) and kernel.target.threads == 1
        found = session.run(X)
    with Session(two_branches(), config_of(**{**BY_COST, "policy": "priority"})) as session:
        assert not session.report.together()
        for name, array in session.run(X).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6)


@pytest.mark.parametrize(
    ("fast", "slow", "threads"),
    [(2e-3, 4e-3, 1), (2e-3, 0.5e-3, 2), (4e-6, 4e-6, 2)],
    ids=["one thread", "too little to gain", "too short"],
)
def test_waves_are_not_chosen_otherwise(
    monkeypatch: pytest.MonkeyPatch, fast: float, slow: float, threads: int
) -> None:
    costs(monkeypatch, fast, slow)
    with Session(two_branches(), config_of(**{**BY_COST, "threads": threads})) as session:
        assert not session.report.together()


def test_costs_are_not_looked_at_where_there_is_too_little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "guessed", None)
    with Session(two_branches(), config_of(**BY_COST)) as session:
        assert not session.report.together() and session.report.by_provider()["reference"] == 3
