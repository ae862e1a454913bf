"""Operands that do not belong together, or whose content leads nowhere: generated code and the reference agree on what
is an error, and on the result where there is none.

The cases are those of the standard with one operand changed; shapes are taken out of the models, so that nothing is
refused before the operator sees it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.errors import RanvierError
from tests.conformance.cases import WAITING, Case, all_cases

CHANGES = 8  # per case
LIMITS = rv.Limits(tensor_bytes=1 << 26)
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Dropout",
}


def _cases() -> list[Case]:
    """A few of each operator, apart from those that are whole functions."""
    found: dict[str, list[Case]] = {}
    for case in all_cases():
        if case.kind == "node" and case.name not in WAITING and "_expanded" not in case.name:
            ops = [node.op_type for node in case.model().graph.node if node.op_type != "Constant"]
            if len(ops) == 1 and ops[0] not in RANDOM:
                found.setdefault(ops[0], []).append(case)
    # the first and the last: the plainest, and one with more operands
    return [case for same in found.values() for case in same[:: max(1, len(same) - 1)]]


def without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for info in [*made.graph.input, *made.graph.output]:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del made.graph.value_info[:]
    return made


def changed(rng: random.Random, inputs: list[Any]) -> list[Any] | None:
    """The inputs with one of them shorter, longer, of another rank, empty, or with an odd number in it."""
    places = [k for k, x in enumerate(inputs) if isinstance(x, np.ndarray) and x.dtype != object]
    if not places:
        return None
    place = rng.choice(places)
    x = inputs[place]
    kind = rng.choice(["size", "size", "one", "empty", "lower", "higher", "content"])
    if kind == "content":
        if x.dtype.kind != "i" or not x.size:
            return None
        made = x.copy()
        made.reshape(-1)[rng.randrange(x.size)] = rng.choice([-1, -7, 0, 2, 99])
    elif kind == "higher":
        made = x[None]
    elif not x.ndim:
        return None
    elif kind == "lower":
        if not len(x):
            return None
        made = x[0]
    else:
        axis = rng.randrange(x.ndim)
        size = x.shape[axis]
        if not size:
            return None
        count = {"one": 1, "empty": 0, "size": rng.choice([size - 1, size + 1, 2 * size])}[kind]
        made = np.take(x, np.arange(count) % size, axis=axis)
    return [made if k == place else given for k, given in enumerate(inputs)]


def outcome(session: rv.Session, inputs: list[Any]) -> type[RanvierError] | list[Any]:
    try:
        return list(session.run(inputs).values())
    except RanvierError as error:
        return type(error)


def close(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        return bool((a == b).all())
    tolerance = 1e-3 if a.dtype.itemsize > 2 else 2e-2
    if a.dtype.kind in "iu":
        tolerance = 1.0  # a rounding step of a quantized result
    return np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_changed_operands(case: Case) -> None:
    model = without_shapes(case.model())
    generated = rv.load(model, optimization="none", limits=LIMITS)
    if not any(node.provider == "cpu" for node in generated.report.nodes):
        return
    reference = rv.load(model, optimization="none", limits=LIMITS, providers=["reference"])
    rng = random.Random(case.name)
    inputs, _ = next(iter(case.data(case.model())))
    for _ in range(CHANGES):
        given = changed(rng, inputs)
        if given is None:
            continue
        shapes = [getattr(x, "shape", x) for x in given]
        expected, got = outcome(reference, given), outcome(generated, given)
        if isinstance(expected, type) or isinstance(got, type):
            assert got == expected, shapes
        else:
            assert all(close(a, b) for a, b in zip(got, expected, strict=True)), shapes
