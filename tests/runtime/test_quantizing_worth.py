"""Layers whose codes save no time."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ranvier.runtime.quantizing import Quantization, Quantizer, worth
from ranvier.runtime.quantizing.worth import fastest, without_gain
from tests.runtime.test_quantizing_choice import FEEDS, chain
from tests.runtime.test_quantizing_layers import CONFIG

LAYERS = [f"layer{k}" for k in range(40)]
COST = {name: 1.5 if 8 <= k < 20 else 0.5 for k, name in enumerate(LAYERS)}  # of codes; 1 without


class Model:
    """A session that knows only which layers have no codes."""

    opened = closed = 0

    def __init__(self, kept: Any, config: Any) -> None:
        Model.opened += 1
        self.time = sum(1.0 if name in kept else COST[name] for name in LAYERS)

    def close(self) -> None:
        Model.closed += 1


@pytest.fixture
def told_times(monkeypatch: pytest.MonkeyPatch) -> None:
    Model.opened = Model.closed = 0
    monkeypatch.setattr(worth, "Session", Model)
    monkeypatch.setattr(worth, "fastest", lambda sessions, feed, seconds: [each.time for each in sessions])


def chosen(kept: frozenset[str], until: float = math.inf) -> frozenset[str]:
    found = without_gain(LAYERS, kept, lambda names: names, {}, CONFIG, until, lambda done, of: None)  # type: ignore[arg-type,return-value]
    assert Model.opened == Model.closed > 0
    return found


def test_neighbours_that_are_faster_without_codes(told_times: None) -> None:
    assert chosen(frozenset()) == {name for name in LAYERS if COST[name] > 1}
    assert chosen(frozenset(LAYERS[:8])) <= {name for name in LAYERS if COST[name] > 1}


def test_one_layer_stays_coded(told_times: None) -> None:
    slow = frozenset(name for name in LAYERS if COST[name] < 1)
    found = chosen(slow)
    assert found and len(found | slow) < len(LAYERS)


def test_the_layer_that_stays_coded_is_the_one_that_costs_least(
    told_times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "_BATCHES", len(LAYERS))
    monkeypatch.setitem(COST, "layer9", 1.1)
    assert chosen(frozenset(name for name in LAYERS if COST[name] < 1)) == {
        name for name in LAYERS if COST[name] > 1 and name != "layer9"
    }


def test_neighbours_that_pay_for_each_other_only(told_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers share a conversion: one of them alone is slower, both without codes are fastest."""
    pair = frozenset(LAYERS[:2])
    kept = frozenset(LAYERS[3:])

    class Shared(Model):
        def __init__(self, names: Any, config: Any) -> None:
            super().__init__(names, config)
            self.time = {0: 1.2, 1: 1.4, 2: 1.0}[len(pair & names)] + 0.1 * (LAYERS[2] in names)

    monkeypatch.setattr(worth, "Session", Shared)
    assert chosen(kept) == pair


def test_no_more_than_the_time_there_is(told_times: None) -> None:
    assert chosen(frozenset(), until=0.0) == frozenset()


def test_models_have_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "_LESS", math.inf)  # everything is faster without codes
    options = Quantization(slower=1e9, equalize=False, max_error=1.0, timed=True)
    _, report = Quantizer(chain(), FEEDS, options, CONFIG).run()
    coded = [layer for layer in report.layers if layer.scheme == "int8"]
    assert len(coded) == 1 and {layer.reason for layer in report.layers} == {"", "it saved no time"}


def test_turns_find_the_faster_one() -> None:
    class Sleeper:
        def __init__(self, seconds: float) -> None:
            self.seconds, self.runs = seconds, 0

        def run(self, feed: Any) -> None:
            self.runs += 1
            time.sleep(self.seconds)

    both = Sleeper(0.0), Sleeper(0.02)
    first, second = fastest(both, {}, 0.0)  # type: ignore[arg-type]
    assert first < second and second >= 0.02 and [each.runs for each in both] == [4, 4]
