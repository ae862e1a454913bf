"""Attention and the products before it, as exporters spell them, in few steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv
from ranvier.providers.cuda import specialise
from ranvier.providers.cuda.attending import AttentionStep
from ranvier.providers.cuda.realise import ContractionStep, LoopStep
from ranvier.providers.cuda.steps import Step
from tests.torch.device import options as provider_options

Array = np.ndarray[Any, Any]
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def run(
    text: str, constants: dict[str, Array], inputs: dict[str, Array], *, runs: int = 2, off: float = 6e-3
) -> list[Step]:
    """The steps of a graph's only part; results are compared with the reference's in every run."""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    seen: list[list[Step]] = []
    whole = specialise.Specialiser.__call__

    def watched(self: Any, *given: Any) -> list[Step]:
        seen.append(whole(self, *given))
        return seen[-1]

    wanted = rv.load(model, providers=["reference"], optimization="none").run(inputs)
    options = provider_options(triton=True)
    with (
        mock.patch.object(specialise.Specialiser, "__call__", watched),
        rv.load(
            model, providers=["cuda", "reference"], provider_options=options, optimization="none", fallback="off"
        ) as session,
    ):
        for _ in range(runs):
            found = session.run(inputs)
            for name, array in wanted.items():
                a, b = found[name].astype(np.float64), array.astype(np.float64)
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=off, atol=off * max(1.0, float(np.abs(b).max())))
    (made,) = seen
    return made


def inner(steps: list[Step], kind: type) -> list[Any]:
    return [step for each in steps if isinstance(step := getattr(each, "step", each), kind)]


def halves(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float16)


LAYER = """
    q0 = MatMul(x, wq)
    q1 = Add(q0, bq)
    k0 = MatMul(x, wk)
    k1 = Add(bk, k0)
    v0 = MatMul(x, wv)
    v1 = Add(v0, bv)
    q2 = Reshape(q1, split)
    q = Transpose <perm = [0,2,1,3]> (q2)
    k2 = Reshape(k1, split)
    kt = Transpose <perm = [0,2,3,1]> (k2)
    v2 = Reshape(v1, split)
    v = Transpose <perm = [0,2,1,3]> (v2)
"""
TAIL = """
    w = Softmax <axis = -1> (m)
    o = MatMul(w, v)
    t = Transpose <perm = [0,2,1,3]> (o)
    r = Reshape(t, joined)
    p = MatMul(r, wo)
    y = Add(p, x)
"""


def weights() -> dict[str, Array]:
    found: dict[str, Array] = {f"w{n}": halves(16, 16, seed=k, scale=0.3) for k, n in enumerate("qkvo")}
    found |= {f"b{n}": halves(16, seed=10 + k) for k, n in enumerate("qkv")}
    return found | {"split": np.array([0, 0, 2, 8]), "joined": np.array([0, 0, 16]), "root": np.float16([8**0.5])}


def test_a_layer_as_bert_has_it_is_three_steps() -> None:
    made = run(
        "g (float16[2,5,16] x, float16[2,1,1,5] mask) => (float16[2,5,16] y) {"
        + LAYER
        + "s = MatMul(q, kt) d = Div(s, root) m = Add(d, mask)"
        + TAIL
        + "}",
        weights(),
        {"x": halves(2, 5, 16, seed=20), "mask": np.float16([0, 0, 0, -65504, 0] * 2).reshape(2, 1, 1, 5)},
    )
    assert len(inner(made, AttentionStep)) == 1 and len(inner(made, ContractionStep)) == 2
    assert not inner(made, LoopStep)  # nothing is copied around it


@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_mask_that_is_a_constant(padded: bool) -> None:
    low = {"allowed": np.tri(5, dtype=bool)[None, None], "low": np.float16([-65504])}
    inputs = {"x": halves(2, 5, 16, seed=20)}
    masked = "u = Where(allowed, d, low)"
    if padded:
        inputs["mask"] = np.float16([0, 0, 0, 0, -65504] * 2).reshape(2, 1, 1, 5)
        masked += " m = Add(u, mask)"
    else:
        masked += " m = Identity(u)"
    given = ", float16[2,1,1,5] mask" if padded else ""
    text = f"g (float16[2,5,16] x{given}) => (float16[2,5,16] y) {{{LAYER} s = MatMul(q, kt) d = Div(s, root) "
    made = run(
        (text + masked + TAIL + "}").replace("m = Identity(u)", "").replace("(m)", "(m)" if padded else "(u)"),
        {**weights(), **low},
        inputs,
    )
    (step,) = inner(made, AttentionStep)
    assert step.causal is not padded
    assert len(inner(made, LoopStep)) == int(padded)  # the mask


def test_scores_that_somebody_sees_stay() -> None:
    made = run(
        "g (float16[2,5,16] x, float16[2,1,1,5] mask) => (float16[2,5,16] y, float16[2,2,5,5] w) {"
        + LAYER
        + "s = MatMul(q, kt) d = Div(s, root) m = Add(d, mask)"
        + TAIL
        + "}",
        weights(),
        {"x": halves(2, 5, 16, seed=20), "mask": np.float16([0, 0, 0, -65504, 0] * 2).reshape(2, 1, 1, 5)},
    )
    assert not inner(made, AttentionStep)


def test_layers_that_only_know_matrices_take_what_is_behind_them() -> None:
    made = run(
        """g (float16[2,3,8] x, float16[2,3,12] z, float16[2,0,12] before) => (float16[2,3,12] y, float16[2,3,12] all) {
            f = Reshape(x, flat)
            a = Gemm(f, w, b)
            s = Reshape(a, back)
            t = Tanh(s)
            y = Add(t, z)
            all = Concat <axis = 1> (before, y)
        }""",
        {
            "flat": np.array([-1, 8]),
            "back": np.array([2, 3, 12]),
            "w": halves(8, 12, seed=1),
            "b": halves(12, seed=2),
        },
        {"x": halves(2, 3, 8), "z": halves(2, 3, 12, seed=3), "before": halves(2, 0, 12)},
    )
    assert len(inner(made, ContractionStep)) == 1 and not inner(made, LoopStep)
    assert not any(getattr(getattr(step, "node", None), "op", "") == "Concat" for step in made)


def test_a_matrix_with_rows_of_an_odd_length_lies_the_other_way_round() -> None:
    made = run(
        "g (float16[3,8] x) => (float16[3,1025] y) { y = MatMul(x, w) }",
        {"w": halves(8, 1025, seed=1)},
        {"x": halves(3, 8)},
    )
    (step,) = inner(made, ContractionStep)
    assert step.work.right.strides[1:] == (1, 8)


@pytest.mark.parametrize(
    ("mask", "is_row"),
    [((2, 1, 1, 5), True), ((1, 1, 1, 5), True), ((2, 1, 5, 5), False), ((1, 2, 1, 5), False)],
)
def test_padding_beside_a_causal_mask_is_known(mask: tuple[int, ...], is_row: bool) -> None:
    added = np.where(np.arange(np.prod(mask)).reshape(mask) % 5 == 1, np.float16(-60000), np.float16(0))
    made = run(
        f"g (float16[2,5,16] x, float16[{','.join(map(str, mask))}] mask) => (float16[2,5,16] y) {{"
        + LAYER
        + "s = MatMul(q, kt) d = Div(s, root) c = Where(causal, d, low) m = Add(c, mask)"
        + TAIL
        + "}",
        {**weights(), "causal": np.tri(5, dtype=bool)[None, None], "low": np.float16(-60000)},
        {"x": halves(2, 5, 16, seed=20), "mask": added},
    )
    (attention,) = inner(made, AttentionStep)
    assert (attention.row is not None) == is_row
