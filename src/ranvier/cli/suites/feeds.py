"""Inputs for benchmark cases, from short descriptions such as ``normal(0.1) 1x16000``.

A description says how values are made and in which shape; the element type is the one the model declares. Random
models give random results with any input, but trained ones do not take the same time with every one: boxes that
overlap, token ids out of range or sound far too loud make them do other work than in use.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ranvier.cli.inputs import InputRequest, collect
from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType

Array = np.ndarray[Any, Any]
Maker = Callable[..., Array]
_DESCRIPTION = re.compile(r"(\w+)(?:\(([^)]*)\))? (scalar|\d+(?:x\d+)*)")


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    return np.asarray(rng.standard_normal(shape) * scale)


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Array:
    return np.asarray(rng.uniform(low, high, shape))


def _integers(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    return np.asarray(rng.integers(int(low), int(high), shape))


def _constant(rng: np.random.Generator, shape: tuple[int, ...], value: float) -> Array:
    return np.full(shape, value)


def _counting(rng: np.random.Generator, shape: tuple[int, ...], first: float = 0.0) -> Array:
    """Positions of tokens: the last axis counts on from ``first``."""
    return np.broadcast_to(int(first) + np.arange(shape[-1]), shape)


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]


def _boxes(rng: np.random.Generator, shape: tuple[int, ...], side: float) -> Array:
    """Raw answers of a detector: centres, sizes, then scores of classes of which about one in 7,000 is not tiny."""
    found = rng.random(shape) ** 10_000
    found[:, :2] = rng.uniform(0.0, side, found[:, :2].shape)
    found[:, 2:4] = rng.uniform(side / 40, side / 4, found[:, 2:4].shape)
    return found


MAKERS: dict[str, Maker] = {
    "normal": _normal,
    "uniform": _uniform,
    "integers": _integers,
    "constant": _constant,
    "counting": _counting,
    "one_hot": _one_hot,
    "boxes": _boxes,
}


def parse(description: str) -> Callable[[np.random.Generator], Array]:
    """What makes the values; InvalidConfig where the description is none."""
    match = _DESCRIPTION.fullmatch(description)
    if match is None:
        raise InvalidConfig(f"input {description!r} is not of the form 'normal(0.1) 1x3x224x224'")
    kind, arguments, size = match.groups()
    if kind not in MAKERS:
        raise InvalidConfig(f"input {description!r}: no kind {kind!r}{nearest(kind, MAKERS)}")
    numbers = [float(part) for part in arguments.split(",")] if arguments else []
    shape = () if size == "scalar" else tuple(int(part) for part in size.split("x"))
    return lambda rng: MAKERS[kind](rng, shape, *numbers)


def make(graph: Graph, descriptions: Mapping[str, str], seed: int = 0) -> dict[str, Any]:
    """Values for the inputs of a model. Names may be patterns; inputs that none fits get plain random values."""
    declared = {value.name: value.type for value in graph.required_inputs()}
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, kind in declared.items():
        pattern = next((p for p in descriptions if p == name or fnmatch.fnmatchcase(name, p)), None)
        if pattern is None:
            continue
        values = parse(descriptions[pattern])(rng)
        dtype = kind.dtype if isinstance(kind, TensorType) else None
        found[name] = np.array(values, np.float32 if dtype is None else dtype.numpy, order="C")
    missing = [name for name in declared if name not in found]
    if missing:
        given = tuple(f"{name}=random" for name in missing)
        found.update(collect(graph, InputRequest(given, seed=seed), {}).values)
    return {name: found[name] for name in declared}
