"""An LSTM that keeps its gates, and its way back through time, against the operators' definitions in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent import Kept, Layer, Operands, Results, Slopes, lstm_slopes, recurrent, work
from ranvier.codegen.storage import Storage, View
from ranvier.ops.own.lstm import lstm_slopes as defined_slopes
from ranvier.ops.own.lstm import lstm_training as defined_training
from tests.codegen.harness import ISAS, Array, Runner, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
SIZES = [(1, 1, 1, 1), (3, 2, 5, 4), (4, 13, 17, 33), (2, 7, 40, 16), (3, 9, 16, 70)]  # steps, batch, inputs, units
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_kept: list[object] = []  # kernels of earlier cases: most cases share them, and each is compiled once


def drawn(*shape: int, seed: int, dtype: Any = np.float32) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.5).astype(dtype)


def layer_operands(
    direction: str, steps: int, batch: int, width: int, size: int, dtype: Any = np.float32
) -> dict[str, Array]:
    ways = len(DIRECTIONS[direction])
    shapes = {
        "x": (steps, batch, width),
        "w": (ways, 4 * size, width),
        "r": (ways, 4 * size, size),
        "bias": (ways, 8 * size),
        "initial_h": (ways, batch, size),
        "initial_c": (ways, batch, size),
        "peepholes": (ways, 3 * size),
    }
    return {name: drawn(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def wide(arrays: Mapping[str, Array | None]) -> dict[str, Array | None]:
    return {name: None if a is None else a.astype(np.float64) for name, a in arrays.items()}


class Memory:
    """Views of arrays, and which array each stands for."""

    def __init__(self) -> None:
        self.bound: dict[Storage, Array] = {}

    def view(self, array: Array | None, kind: str = "input") -> View | None:
        if array is None:
            return None
        found = view_of(array, kind)
        self.bound[found.storage] = array
        return found

    def run(self, launches: Any, isa: Isa, split: int) -> None:
        runner = Runner(launches, isa, self.bound, split=split, poison=0xFF)
        _kept.append(runner.kernels)
        runner()


def trained(
    isa: Isa, direction: str, arrays: Mapping[str, Array | None], *, threads: int = 1, split: int = 1
) -> list[Array]:
    """Y, Y_h, Y_c, cells and gates."""
    x, r = arrays["x"], arrays["r"]
    assert x is not None and r is not None
    over_time = (x.shape[0], r.shape[0], x.shape[1], r.shape[2])
    shapes = [over_time, over_time[1:], over_time[1:], over_time, (*over_time[:3], 4 * over_time[3])]
    found = [np.full(shape, np.nan, x.dtype) for shape in shapes]
    memory = Memory()
    given = Operands(**{name: memory.view(a) for name, a in arrays.items()})  # type: ignore[arg-type]
    wanted = Results(*(memory.view(a, "output") for a in found))
    memory.run(recurrent(Layer("LSTM", direction), given, wanted, isa, threads=threads), isa, split)
    return found


def walked_back(
    isa: Isa,
    direction: str,
    arrays: Mapping[str, Array | None],
    *,
    threads: int = 1,
    split: int = 1,
    states: bool = True,
) -> list[Array]:
    """Slopes of gates, and of the first states where they are wanted."""
    gates, cells = arrays["gates"], arrays["cells"]
    assert gates is not None and cells is not None
    shapes = [gates.shape, *([cells.shape[1:]] * 2 if states else [])]
    found = [np.full(shape, np.nan, gates.dtype) for shape in shapes]
    memory = Memory()
    given = Kept(**{name: memory.view(a) for name, a in arrays.items()})  # type: ignore[arg-type]
    wanted = Slopes(*(memory.view(a, "output") for a in found))  # type: ignore[arg-type]
    memory.run(lstm_slopes(given, wanted, DIRECTIONS[direction], isa, threads=threads), isa, split)
    return found


def slope_operands(
    direction: str, steps: int, batch: int, size: int, without: tuple[str, ...] = (), dtype: Any = np.float32
) -> dict[str, Array | None]:
    ways = len(DIRECTIONS[direction])
    over_time, state = (steps, ways, batch, size), (ways, batch, size)
    arrays: dict[str, Array | None] = {
        "r": drawn(ways, 4 * size, size, seed=20, dtype=dtype),
        "gates": drawn(*over_time[:3], 4 * size, seed=21, dtype=dtype),
        "cells": drawn(*over_time, seed=22, dtype=dtype),
        "initial_c": drawn(*state, seed=23, dtype=dtype),
        "peepholes": drawn(ways, 3 * size, seed=24, dtype=dtype),
        "grad_y": drawn(*over_time, seed=25, dtype=dtype),
        "grad_h": drawn(*state, seed=26, dtype=dtype),
        "grad_c": drawn(*state, seed=27, dtype=dtype),
    }
    return {name: None if name in without else a for name, a in arrays.items()}


def tolerance(dtype: Any) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-11, "atol": 1e-11}


@each_isa
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_and_cells_are_kept(isa: Isa, direction: str, dtype: Any) -> None:
    for sizes in SIZES:
        arrays: dict[str, Array | None] = {**layer_operands(direction, *sizes, dtype=dtype)}
        for absent in ((), ("bias", "initial_h", "initial_c", "peepholes")):
            given = {name: None if name in absent else a for name, a in arrays.items()}
            expected = defined_training.body(**wide(given), hidden_size=sizes[3], direction=direction)
            for have, want in zip(trained(isa, direction, given, threads=2, split=2), expected, strict=True):
                np.testing.assert_allclose(have, want, **tolerance(dtype))


@each_isa
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slopes(isa: Isa, direction: str, dtype: Any) -> None:
    optional = ("initial_c", "peepholes", "grad_y", "grad_h", "grad_c")
    for steps, batch, _, size in SIZES:
        for without in ((), optional[:2], optional[3:], optional[2:3]):
            arrays = slope_operands(direction, steps, batch, size, without, dtype)
            expected = defined_slopes.body(**wide(arrays), direction=direction)
            for have, want in zip(walked_back(isa, direction, arrays, threads=2, split=2), expected, strict=True):
                np.testing.assert_allclose(have, want, **tolerance(dtype))


@each_isa
@pytest.mark.parametrize(
    ("direction", "batch", "size"), [("forward", 9, 70), ("bidirectional", 19, 40), ("reverse", 1, 90)]
)
def test_however_threads_divide_the_steps(
    isa: Isa, direction: str, batch: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By panels of units with a round for every step, by sequences, and by rounds on one thread: the same bits."""
    arrays = slope_operands(direction, 4, batch, size)
    alone = walked_back(isa, direction, arrays)
    found = [walked_back(isa, direction, arrays, threads=5, split=4)]
    for name, value, threads in (("_SHARED_NS", 0.0, 5), ("_ROUND_NS", 0.0, 1)):
        with monkeypatch.context() as patched:
            patched.setattr(work, name, value)
            found += [walked_back(isa, direction, arrays, threads=threads, split=split) for split in (1, 64)]
    for each in found:
        for have, want in zip(each, alone, strict=True):
            np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(walked_back(isa, direction, arrays, states=False)[0], alone[0])


@each_isa
def test_no_steps_hand_gradients_through(isa: Isa) -> None:
    arrays = slope_operands("forward", 0, 3, 5)
    slopes, to_hidden, to_memory = walked_back(isa, "forward", arrays)
    assert slopes.shape == (0, 1, 3, 20)
    np.testing.assert_array_equal(to_hidden, arrays["grad_h"])
    np.testing.assert_array_equal(to_memory, arrays["grad_c"])
