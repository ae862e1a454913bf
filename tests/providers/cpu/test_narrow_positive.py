"""What is told of definitions alone: numbers that are never negative, and results as exact as their operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.codegen.definitions.program import Definitions
from ranvier.providers.cpu import kernel
from ranvier.providers.cpu.narrow.positive import Positive
from ranvier.providers.cpu.narrow.sensitive import LOG, ROUNDED, SIGNAL, exact_reads
from tests.providers.cpu.test_precision import floats, model, node

Array = np.ndarray[Any, Any]


def defined(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, Array], outputs: str, constants: Mapping[str, Any] | None = None
) -> Definitions:
    """The definitions of a model on the CPU provider."""
    found: list[Definitions] = []

    def define(*given: Any) -> Definitions:
        found.append(whole(*given))
        return found[-1]

    whole = kernel.define
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "define", define)
        with rv.load(model(nodes, inputs, outputs, constants), providers=["cpu"], optimization="none") as session:
            session.run(dict(inputs))
    return found[-1]


WEIGHTS, BANDS = floats(1, 64, 40), np.abs(floats(2, 40, 20))
X = floats(0, 8, 64)
FACTS = {
    # the last node's result: is it never negative, and as exact as its operands?
    "signal": ([node("MatMul", "x w", "y")], False, False),
    "power": ([node("MatMul", "x w", "s"), node("Mul", "s s", "y")], True, True),
    "square": ([node("MatMul", "x w", "s"), node("Pow", "s two", "y")], True, True),
    "sum of squares": ([node("MatMul", "x w", "s"), node("ReduceSumSquare", "s axes", "y")], True, True),
    "norm": ([node("ReduceL2", "x axes", "y")], True, True),
    "sum": ([node("ReduceSum", "x axes", "y")], False, False),
    "mean of magnitudes": ([node("Abs", "x", "a"), node("ReduceMean", "a axes", "y")], True, True),
    "largest": ([node("ReduceMax", "x axes", "y")], False, True),
    "bands": ([node("Abs", "x", "a"), node("MatMul", "a wide", "y")], True, True),
    "bands of a signal": ([node("MatMul", "x wide", "y")], False, False),
    "magnitudes by weights": ([node("Abs", "x", "a"), node("MatMul", "a w", "y")], False, False),
    "difference": ([node("Abs", "x", "a"), node("Sub", "a one", "y")], False, False),
    "shifted power": ([node("Mul", "x x", "p"), node("Add", "p one", "y")], True, True),
    "shifted signal": ([node("Add", "x one", "y")], False, False),
    "clipped": ([node("Clip", "x one", "y")], True, True),
    "root of a power": ([node("Mul", "x x", "p"), node("Sqrt", "p", "y")], True, True),
    "rounded": ([node("Abs", "x", "a"), node("Floor", "a", "y")], False, False),
    "turned": ([node("Abs", "x", "a"), node("Transpose", "a", "y")], True, True),
    "exponential": ([node("Exp", "x", "y")], True, False),
}
CONSTANTS = {
    "w": WEIGHTS,
    "wide": np.abs(floats(3, 64, 20)),
    "two": np.float32(2),
    "one": np.float32(1),
    "axes": np.array([-1]),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    nodes, positive, keeps = FACTS[name]
    used = {each for n in nodes for each in n.input}
    program = defined(nodes, {"x": X}, "y", {k: v for k, v in CONSTANTS.items() if k in used})
    known, last = Positive(program.defs, program), program.defs[-1]
    assert known.value(last.out) == positive
    assert all(known.keeps(each) for each in program.defs if each.label == last.label) == keeps


def test_what_a_logarithm_shows() -> None:
    """From the signal on nothing may be rounded; powers and bands of them may."""
    front = [node("MatMul", "x w", "s"), node("Mul", "s s", "p"), node("MatMul", "p b", "m")]
    rest = [node("Clip", "m low", "c"), node("Log", "c", "l")]
    program = defined(front + rest, {"x": X}, "l", {"w": WEIGHTS, "b": BANDS, "low": np.float32(1e-6)})
    known = Positive(program.defs, program)

    class Whole:
        defs = program.defs

    by_label = {each.label: each.out for each in program.defs}
    found = exact_reads(Whole, program, known.keeps)  # type: ignore[arg-type]
    assert found[by_label["Clip_c"]] == LOG
    assert found[by_label["MatMul_m"]] == found[by_label["Mul_p"]] == found[by_label["MatMul_s"]] == ROUNDED
    signal = next(v for each in program.defs if each.label == "MatMul_s" for v in each.operands)
    assert found[signal] == SIGNAL
    none = exact_reads(Whole, program, lambda each: False)  # type: ignore[arg-type]
    assert none[by_label["Mul_p"]] == none[signal] == SIGNAL
