"""Whole models compared: how far off, how fast, and which layers are better without codes."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from ranvier.graph.extract import copied
from ranvier.runtime.quantizing import Quantization, costs, forms
from ranvier.runtime.quantizing.costs import measured, work_of
from ranvier.runtime.quantizing.forms import Form, Ranked, Trials, fastest
from ranvier.runtime.quantizing.maker import Maker
from ranvier.runtime.quantizing.tails import tail
from ranvier.runtime.session import Session
from tests.runtime.test_quantizing_choice import FEEDS, chain
from tests.runtime.test_quantizing_layers import CONFIG

LAYERS = [f"layer{k}" for k in range(40)]
BATCHES = [frozenset(LAYERS[k : k + 4]) for k in range(0, 40, 4)]
COST = {name: 1.5 if 8 <= k < 20 else 0.5 for k, name in enumerate(LAYERS)}  # of codes; 1 without
EVERY = frozenset(LAYERS)


class Model:
    """A session that knows only which layers have no codes, and how far results are off with the others'."""

    opened = closed = 0

    def __init__(self, form: Any, config: Any) -> None:
        Model.opened += 1
        self.form = form
        self.time = sum(1.0 if name in form.floats else COST[name] for name in LAYERS)

    def run(self, feed: Any) -> dict[str, Any]:
        off = 0.001 * len(EVERY - self.form.floats)
        return {"y": np.array([1.0, off])}

    def close(self) -> None:
        Model.closed += 1


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Any:
    Model.opened = Model.closed = 0
    monkeypatch.setattr(forms, "Session", Model)
    monkeypatch.setattr(forms, "fastest", lambda sessions, feed, seconds: [each.time for each in sessions])
    groups = [([{}], [[np.array([1.0, 0.0])]])]
    make: Any = lambda form: form  # noqa: E731 - a model that is its form
    with Trials(make, CONFIG, groups, lambda found: found.error <= 0.035) as made:
        yield made
    assert Model.opened == Model.closed > 0


def flipped(form: Form, batch: frozenset[str]) -> Form | None:
    floats = form.floats - batch if batch <= form.floats else form.floats | batch
    return None if floats == EVERY else Form(floats)


def improved(trials: Trials, start: Form, until: float = math.inf) -> Form:
    return trials.improved(start, BATCHES, flipped, trials.near, until, lambda done, of: None)


def test_layers_that_are_faster_without_codes_have_none(trials: Trials) -> None:
    start = Form(frozenset(LAYERS[4:16]))
    assert improved(trials, start).floats == {name for name in LAYERS if COST[name] > 1}


def test_layers_that_are_faster_with_codes_get_them_as_long_as_results_are_near(trials: Trials) -> None:
    """Twenty-eight layers are faster so, and the error allows all of them; with less room, some."""
    assert improved(trials, Form(EVERY)).floats == {name for name in LAYERS if COST[name] > 1}
    found = trials.improved(
        Form(EVERY), BATCHES, flipped, lambda form: trials.difference(form).error <= 0.01, math.inf, lambda *_: None
    )
    assert len(EVERY - found.floats) == 8


def test_no_more_than_the_time_there_is(trials: Trials) -> None:
    start = Form(frozenset())
    assert trials.near(Form(EVERY)) and improved(trials, start, until=0.0) == start


def test_the_fastest_comes_first_and_of_even_ones_the_first(trials: Trials) -> None:
    slow, quick, same = (
        Form(frozenset(LAYERS[:8])),
        Form(frozenset(LAYERS[8:20])),
        Form(frozenset(LAYERS[8:20]), None, False),
    )
    assert [each.form for each in trials.ranked([slow, quick, same], 0.0)] == [quick, same, slow]


def test_forms_that_are_about_as_fast_are_all_improved(trials: Trials) -> None:
    """The second becomes faster than what the first becomes; what is much slower is not asked."""
    first, second, slow = (Form(frozenset(LAYERS[:k])) for k in (1, 2, 3))
    better = {first: Form(frozenset(LAYERS[8:12])), second: Form(frozenset(LAYERS[8:20]))}
    ranked = [Ranked(1.0, first), Ranked(1.05, second), Ranked(1.5, slow)]
    assert trials.all_improved(ranked, better.__getitem__, 0.0) == [better[second], better[first]]
    assert trials.all_improved(ranked[:1], better.__getitem__, 0.0) == [better[first]]


def test_forms_are_made_once_and_few_stay_open(trials: Trials) -> None:
    near = [Form(frozenset(LAYERS[: 10 + k])) for k in range(6)]
    for _ in range(2):
        assert all(trials.near(form) for form in near)
    assert Model.opened == 6 and Model.closed == 2
    far = Form(frozenset())
    assert not trials.near(far) and Model.closed == 4  # it is not kept, and another had to go for it
    trials.forget(lambda form: form == far)
    assert not trials.near(far) and Model.opened == 8


def test_of_groups_of_samples_the_worst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "Session", Model)
    lucky, other = np.array([1.0, 0.04]), np.array([1.0, 0.0])
    make: Any = lambda form: form  # noqa: E731
    with Trials(make, CONFIG, [([{}], [[lucky]]), ([{}], [[other]])], lambda found: found.error <= 0.035) as trials:
        assert trials.difference(Form(frozenset())).error == pytest.approx(0.04)
        assert not trials.near(Form(frozenset()))


def test_samples_that_tell_why_a_form_is_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the largest errors, of the group that is further off."""
    monkeypatch.setattr(forms, "Session", Model)
    make: Any = lambda form: form  # noqa: E731
    few = [{"k": 0}, {"k": 1}], [[np.array([1.0, 0.04])]] * 2
    expected = [[np.array([1.0, 0.04 + off])] for off in (0.01, 0.3, 0.02, 0.2, 0.4)]
    many = [{"k": k} for k in range(5)], expected
    with Trials(make, CONFIG, [few, many], lambda found: found.error <= 0.035) as trials:
        coded = Form(frozenset())
        assert trials.telling(coded) is None and not trials.near(coded)
        found = trials.telling(coded)
        assert found is not None and found.part == 3 / 5
        assert list(found.feeds) == [{"k": 4}, {"k": 1}, {"k": 3}]
        assert all(row is expected[feed["k"]] for row, feed in zip(found.expected, found.feeds))
        trials.forget(lambda form: form == coded)
        assert trials.telling(coded) is None


@pytest.mark.parametrize("coded", [False, True])
def test_what_layers_take_by_kernels(monkeypatch: pytest.MonkeyPatch, coded: bool) -> None:
    """All of a run is some layer's, and each has a part, whatever kernels are called after codes are fused."""
    monkeypatch.setattr(costs, "_LEAST_RUNS", 1)
    maker = Maker(chain(), FEEDS, Quantization(equalize=False), CONFIG)
    work = {site.name: work_of(site, maker.shapes[site.data.name]) for site in maker.sites}
    called = {f"{tail(site.node).value.name}.quantize": site.name for site in maker.sites}
    kept: list[Any] = []
    with Session(maker.made() if coded else copied(maker.graph), CONFIG) as session:
        profile = session.profile

        def profiled() -> Any:
            kept.append(profile())
            return kept[-1]

        session.profile = profiled  # type: ignore[method-assign]
        found = measured(session, FEEDS[0], work, called, 0.0)
    assert found.keys() == work.keys() and all(seconds > 0 for seconds in found.values())
    (once,) = kept
    assert sum(found.values()) == pytest.approx(sum(record.seconds for record in once.records()))


def test_options_of_sessions() -> None:
    config = CONFIG.updated(keep_f32=("head",))
    assert Form(frozenset()).running(config) is config
    found = Form(frozenset(), frozenset({"b[0]", "a"})).running(config)
    assert found.precision == "bf16" and found.keep_f32 == ("head", "a", "b[[]0]")


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
