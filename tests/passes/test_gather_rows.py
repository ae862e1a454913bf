"""Arithmetic with a whole table of constants, of which a few rows are looked up, is done with those rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranvier.graph import Graph
from ranvier.passes import GatherRows
from tests.passes.pass_tools import Applied, Draft, apply

TABLE = np.random.default_rng(5).integers(-128, 128, (50, 6)).astype(np.int8)
INDICES = np.array([[0, 49, -1], [7, 7, -50]])


def scales(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).uniform(0.5, 2, shape).astype(np.float32)


def numbers(d: Draft, *shape: int) -> Any:
    return d.op("Mul", d.op("Cast", TABLE, to=1), scales(*shape))


def looked_up(d: Draft, table: Any, shape: tuple[int, ...] = (2, 3), **how: Any) -> Graph:
    return d.done(d.op("Gather", table, d.input("i", shape, "int64"), **how))


def of_rows(table: Callable[[Draft], Any]) -> Applied:
    def draw() -> Graph:
        d = Draft()
        return looked_up(d, table(d))

    return apply(GatherRows(), draw, feeds=[INDICES])


@pytest.mark.parametrize("shape", [(50, 1), (50, 6), (1, 6), (1, 1), (6,), (1,), ()])
def test_scales_of_any_shape(shape: tuple[int, ...]) -> None:
    done = of_rows(lambda d: numbers(d, *shape))
    assert done.ops[-1] == "Mul" and done.ops.count("Cast") == 1
    assert done.ops.count("Gather") == (2 if shape[:1] == (50,) else 1)
    assert all(node.input(0).const is not None for node in done.graph if node.op == "Gather")


def test_several_steps_and_a_table_of_single_numbers() -> None:
    done = of_rows(
        lambda d: d.op("Neg", d.op("Div", d.op("Sub", d.op("Cast", TABLE[:, 0], to=1), scales(1)), scales(50)))
    )
    assert done.ops.count("Gather") == 2 and done.ops[-1] == "Neg"


def test_every_reader_gathers_its_own() -> None:
    def draw() -> Graph:
        d = Draft()
        table = numbers(d, 50, 1)
        one, other = d.input("i", (2, 3), "int64"), d.input("j", (4,), "int64")
        return d.done(d.op("Gather", table, one), d.op("Gather", table, other))

    assert apply(GatherRows(), draw, feeds=[INDICES, np.array([1, 2, 3, 4])]).ops.count("Gather") == 4


def with_a_reader(d: Draft) -> Graph:
    table = numbers(d, 50, 1)
    return d.done(d.op("Gather", table, d.input("i", (2,), "int64")), table)


def of_two_readers(d: Draft) -> Graph:
    cast = d.op("Cast", TABLE, to=1)
    return looked_up(d, d.op("Mul", cast, cast))


@pytest.mark.parametrize(
    "build",
    [
        with_a_reader,
        of_two_readers,
        lambda d: looked_up(d, numbers(d, 50, 1), axis=1),
        lambda d: looked_up(d, numbers(d, 50, 1), (60,)),
        lambda d: looked_up(d, d.op("Softmax", numbers(d, 50, 1), axis=0)),
        lambda d: looked_up(d, d.op("Mul", d.op("Cast", TABLE, to=1), d.input("x", (50, 1)))),
        lambda d: looked_up(d, d.constant(TABLE)),
    ],
    ids=["it is read", "two read it", "columns", "more than there are", "rows depend", "of an input", "a constant"],
)
def test_what_stays(build: Callable[[Draft], Graph]) -> None:
    assert not apply(GatherRows(), lambda: build(Draft())).ctx.changes
