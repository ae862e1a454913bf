"""Whatever the graph: a pass changes no result, keeps the invariants, and finds nothing more to do a third time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from ranvier.config import Level, SessionConfig
from ranvier.graph import verify
from ranvier.passes import (
    Cancel,
    CommonSubexpressions,
    DeadCode,
    FoldAffine,
    FoldConstants,
    FoldShapes,
    Modernise,
    OptimizationPass,
    PassContext,
    default_passes,
)
from ranvier.passes.evaluate import Evaluator
from tests.passes.pass_tools import assert_equal
from tests.strategies import build, tapes

EXACT: list[OptimizationPass] = [Cancel(), CommonSubexpressions(), DeadCode(), FoldConstants(), FoldShapes()]
ARITHMETIC: list[OptimizationPass] = [Modernise(), FoldAffine()]
TOLERANCE = 2e-5  # of the largest element; rounding adds up over twenty-five nodes

thorough = settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow], database=None
)


def check(passes: list[OptimizationPass], tape: list[int], rtol: float | None, level: Level = "basic") -> None:
    plain, feeds, exact = build(tape)
    graph, _, _ = build(tape)
    for step in passes:
        step.run(graph, PassContext(SessionConfig(optimization=level)))
        verify(graph)
    assert [v.name for v in graph.outputs] == [v.name for v in plain.outputs]
    before, after = Evaluator().graph(plain, feeds), Evaluator().graph(graph, feeds)
    for a, b, bits in zip(before, after, exact):
        assert_equal([a], [b], None if bits else rtol)


@pytest.mark.parametrize("step", EXACT, ids=lambda s: s.name)
def test_exact_passes_keep_every_bit(step: OptimizationPass) -> None:
    @thorough
    @given(tapes())
    def holds(tape: list[int]) -> None:
        check([step], tape, None)

    holds()


@pytest.mark.parametrize("step", ARITHMETIC, ids=lambda s: s.name)
@pytest.mark.parametrize("level", ["basic", "aggressive"])
def test_arithmetic_passes_only_round_differently(step: OptimizationPass, level: Level) -> None:
    @thorough
    @given(tapes())
    def holds(tape: list[int]) -> None:
        check([step], tape, TOLERANCE, level)

    holds()


@pytest.mark.parametrize("level", ["basic", "aggressive"])
def test_the_whole_pipeline(level: Level) -> None:
    @settings(thorough, max_examples=200)
    @given(tapes())
    def holds(tape: list[int]) -> None:
        check(default_passes(), tape, TOLERANCE, level)

    holds()


def test_a_pipeline_run_again_finds_next_to_nothing() -> None:
    @settings(thorough, max_examples=50)
    @given(tapes())
    def holds(tape: list[int]) -> None:
        graph, _, _ = build(tape)
        counts = []
        for _ in range(4):
            counts.append(0)
            for step in default_passes():
                ctx = PassContext()
                step.run(graph, ctx)
                counts[-1] += ctx.changes
        assert counts[-1] == 0, counts

    holds()
