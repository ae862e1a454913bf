"""The search, on times that are made up; and what sessions make of its result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import ranvier
from ranvier.codegen import tuning_store
from ranvier.codegen.tuning import Decision, Table
from ranvier.codegen.tuning_store import Entry
from ranvier.errors import InvalidConfig
from ranvier.runtime.tuning import search
from ranvier.runtime.tuning.variant import Cost, Variant, agree, interleaved
from tests.runtime.small_models import model_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning_store, "folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(tuning_store, "_read", {})
    return tmp_path / "tuning"


# -- with times that are made up --------------------------------------------------------------------------------------


class Machine:
    """Times of what may be decided: by key and name, "" for the default. ``wrong`` names give other results."""

    def __init__(self, times: dict[str, dict[str, float]], wrong: Iterable[str] = ()) -> None:
        self.times, self.wrong = times, set(wrong)
        self.compiled: list[dict[str, str]] = []

    def variant(self, _session: Any, table: Table, _feed: Any) -> FakeVariant:
        self.compiled.append(dict(table.chosen))
        return FakeVariant(self, table)


class FakeVariant:
    def __init__(self, machine: Machine, table: Table) -> None:
        self.machine, self.table = machine, table

    def run(self) -> list[Any]:
        return [np.full(3, 2.0 if set(self.table.chosen.values()) & self.machine.wrong else 1.0)]

    def forget(self) -> None: ...

    def close(self) -> None: ...

    def _time(self, key: str) -> float:
        return self.machine.times[key][self.table.chosen.get(key, "")]

    def decisions(self) -> dict[str, Decision]:
        found = {}
        for key, times in self.machine.times.items():
            others = tuple(name for name in times if name)
            found[key] = Decision(key.rsplit(" ", 1)[0], key, others, self.table.chosen.get(key, ""), 0, 1)
        return found

    def costs(self, keys: Iterable[str]) -> dict[str, Cost]:
        made = self.decisions()
        return {key: Cost(made[key], self._time(key), 1) for key in keys}

    @property
    def seconds(self) -> float:
        return sum(map(self._time, self.machine.times))


class FakeKernel:
    code, threads = "avx2", 1

    def decisions(self) -> list[Decision]:
        return []


def _search(monkeypatch: pytest.MonkeyPatch, machine: Machine, **how: Any) -> search.Tuned:
    monkeypatch.setattr(search, "Variant", machine.variant)
    monkeypatch.setattr(search, "interleaved", lambda *_: None)
    session: Any = SimpleNamespace(
        _parts=[SimpleNamespace(kernel=FakeKernel())], config=SimpleNamespace(precision="float32")
    )
    return search.tune(session, {}, **how)


def test_what_is_faster_is_chosen_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        {
            "conv way a": {"": 1.0, "winograd4": 0.5, "winograd2": 0.8},
            "conv way b": {"": 1.0, "winograd4": 0.99},  # too little to be believed
            "conv panels a": {"": 1.0, "8 x 3": 2.0},
            "threads c": {"": 4.0, "one": 1.0},
        }
    )
    found = _search(monkeypatch, machine)
    chosen = {o.key: (o.chosen, o.gain) for o in found.outcomes}
    assert chosen == {
        "conv way a": ("winograd4", 2.0),
        "conv way b": ("", 1.0),
        "conv panels a": ("", 1.0),
        "threads c": ("one", 4.0),
    }
    assert found.finished and found.kept and found.known == 0
    assert (found.default_seconds, found.tuned_seconds) == (7.0, 3.5)
    assert found.table.chosen == {"conv way a": "winograd4", "threads c": "one"}
    assert tuning_store.entries("avx2", 1)["conv way b"] == Entry("", 1.0, 1.0)
    table = tuning_store.table("avx2", 1)
    assert table is not None and table.chosen == found.table.chosen
    # alternatives of all shapes are tried in the same run; later stages stand on what earlier ones found
    assert {"conv way a": "winograd4", "conv way b": "winograd4"} in machine.compiled
    assert {"conv way a": "winograd4", "conv panels a": "8 x 3"} in machine.compiled


def test_known_shapes_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"conv way a": {"": 1.0, "x": 0.5}})
    _search(monkeypatch, machine)
    machine.compiled.clear()
    found = _search(monkeypatch, machine)
    assert found.outcomes == [] and found.known == 1 and found.gain == 2.0
    assert machine.compiled == [{"conv way a": "x"}, {}]
    machine.times["conv way a"]["x"] = 3.0
    assert _search(monkeypatch, machine, again=True).outcomes[0].chosen == ""
    assert tuning_store.table("avx2", 1) is None


def test_alternatives_with_other_results_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"conv way a": {"": 1.0, "broken": 0.1, "sound": 0.5}}, wrong=["broken"])
    found = _search(monkeypatch, machine)
    assert found.outcomes[0].chosen == "sound" and found.rejected == 1


def test_what_wins_only_once_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"conv way a": {"": 1.0, "x": 0.5}})
    asked = []
    original = FakeVariant.costs

    def costs(self: FakeVariant, keys: Iterable[str]) -> dict[str, Cost]:
        found = original(self, keys)
        if self.table.chosen:
            asked.append(1)
            if len(asked) > 1:  # the second look
                return {key: Cost(c.decision, 1.0, 1) for key, c in found.items()}
        return found

    monkeypatch.setattr(FakeVariant, "costs", costs)
    found = _search(monkeypatch, machine)
    assert found.outcomes[0].chosen == "" and found.outcomes[0].tried == {"x": 0.5}


def test_what_loses_in_the_end_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"conv way a": {"": 1.0, "x": 0.5}, "conv way b": {"": 1.0, "x": 0.5}})

    def forget(_variant: FakeVariant) -> None:  # the last comparison begins
        machine.times["conv way a"]["x"] = 1.5

    monkeypatch.setattr(FakeVariant, "forget", forget)
    found = _search(monkeypatch, machine)
    assert {o.key: o.chosen for o in found.outcomes} == {"conv way a": "", "conv way b": "x"}
    assert found.table.chosen == {"conv way b": "x"}
    assert (found.default_seconds, found.tuned_seconds) == (2.0, 1.5)


def test_without_time_nothing_is_settled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    found = _search(monkeypatch, Machine({"conv way a": {"": 1.0, "x": 0.5}}), seconds=0.0)
    assert not found.finished and found.outcomes == [] and not folder.exists()


def test_what_there_was_no_time_for_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"conv way a": {"": 1.0, "x": 0.5}, "conv way b": {"": 1.0, "x": 0.5, "y": 0.4}})
    monkeypatch.setattr(search._Search, "spent", property(lambda self: float(self.rounds)))
    monkeypatch.setattr(search._Search, "rounds", 0, raising=False)
    against = search._Search._against

    def counted(self: Any, *how: Any) -> Any:
        self.rounds += 1
        return against(self, *how)

    monkeypatch.setattr(search._Search, "_against", counted)
    found = _search(monkeypatch, machine, seconds=1.0)
    assert not found.finished
    assert {o.key: o.chosen for o in found.outcomes} == {"conv way a": "x"}
    assert list(tuning_store.entries("avx2", 1)) == ["conv way a"]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (np.ones(3), np.ones(3) + 1e-4, True),
        (np.ones(3), np.ones(3) + 1e-2, False),
        (np.array([1.0, np.inf]), np.array([1.0, 2.0]), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.ones(3), np.ones(4), False),
        (np.arange(1000), np.arange(1000) + (np.arange(1000) == 3), True),
        (np.arange(10), np.arange(10) + 1, False),
        (np.zeros(0), np.zeros(0), True),
    ],
)
def test_results_agree_but_for_rounding(a: Any, b: Any, same: bool) -> None:
    assert agree([a], [b], narrow=False) is same


# -- sessions ---------------------------------------------------------------------------------------------------------


def _product(*shape: int | str) -> Any:
    value = helper.make_tensor_value_info
    w = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    return model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, (*shape[:-1], 48))],
        {"w": w},
    )


def _decide(session: ranvier.Session, feed: dict[str, Any]) -> None:
    """Keep a decision about the product of the model: for another way than the usual one."""
    kernel = session._parts[0].kernel
    usual = Variant(session, Table(), feed)
    usual.run()
    decision = next(d for d in usual.decisions().values() if d.site == "product panels")
    usual.close()
    assert decision.key == "product panels (40, 64, 48, 'float32', 'constant')"
    tuning_store.save(kernel.code, kernel.threads, {decision.key: Entry(decision.others[0], 1.2, 0.001)})


def test_sessions_use_what_is_known_and_say_so() -> None:
    x = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    with ranvier.load(_product(40, 64), providers=["cpu"]) as plain:
        expected = plain.run({"x": x})["y"]
        assert plain.report.tuned == 0 and "tuned" not in str(plain.report)
        _decide(plain, {"x": x})
    with ranvier.load(_product(40, 64), providers=["cpu"]) as tuned:
        assert tuned.report.tuned == 1 and "tuned: 1 decision" in str(tuned.report)
        np.testing.assert_allclose(tuned.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
    with ranvier.load(_product(40, 64), providers=["cpu"], provider_options={"cpu": {"tuned": False}}) as without:
        assert without.report.tuned == 0
    with ranvier.load(_product(41, 64), providers=["cpu"]) as other:
        assert other.report.tuned == 0


def test_a_session_that_tunes_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "interleaved", lambda one, other, _seconds: interleaved(one, other, 0.0))
    x = np.ones((40, 64), np.float32)
    with ranvier.load(_product(40, 64), providers=["cpu"]) as plain:
        expected = plain.run({"x": x})["y"]
    with ranvier.load(_product(40, 64), providers=["cpu"], tune=60) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
    assert len(list(folder.glob("*.json"))) == 1


def test_sizes_that_are_not_known_are_not_tuned(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ranvier.load(_product("n", 64), providers=["cpu"], tune=0.5, name="free") as session:
        assert session.run({"x": np.ones((2, 64), np.float32)})["y"].shape == (2, 48)
    assert not folder.exists()


def test_what_no_provider_compiles_cannot_be_tuned() -> None:
    with (
        ranvier.load(_product(2, 64), providers=["reference"]) as session,
        pytest.raises(InvalidConfig, match="can be tuned"),
    ):
        search.tune(session, {"x": np.ones((2, 64), np.float32)})
