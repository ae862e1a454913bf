"""Products and convolutions of halves with what follows them, in each form that may be chosen."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx.parser
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv
from ranvier.providers.cuda import realise, specialise
from ranvier.providers.cuda.choosing import Chooser
from ranvier.providers.cuda.realise import ContractionStep, LoopStep
from ranvier.providers.cuda.steps import Step
from tests.torch.device import options as provider_options

Array = np.ndarray[Any, Any]
OPTIONS = provider_options(triton=True)
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
FORMS = ("fused", "library", "tile")


def steps_of(text: str, inputs: dict[str, Array], form: str, *, runs: int = 2, off: float = 4e-3) -> list[Step]:
    """The steps of a graph's only part, after its results were compared with those in float64 of the reference."""
    model = onnx.parser.parse_model(HEADER + text)
    seen: list[list[Step]] = []
    whole = specialise.Specialiser.__call__

    def watched(self: Any, *given: Any) -> list[Step]:
        seen.append(whole(self, *given))
        return seen[-1]

    def chooser(place: Any, prefer: str | None = None) -> Chooser:
        return Chooser(place, form)

    wanted = rv.load(model, providers=["reference"], optimization="none").run(inputs)
    with (
        mock.patch.object(specialise.Specialiser, "__call__", watched),
        mock.patch.object(specialise, "Chooser", chooser),
        rv.load(
            model, providers=["cuda", "reference"], provider_options=OPTIONS, optimization="none", fallback="off"
        ) as session,
    ):
        for _ in range(runs):
            found = session.run(inputs)
            for name, array in wanted.items():
                assert found[name].dtype == array.dtype and found[name].shape == array.shape
                a, b = found[name].astype(np.float64), array.astype(np.float64)
                np.testing.assert_allclose(a, b, rtol=off, atol=off * max(1.0, float(np.abs(b).max())))
    (made,) = seen
    return made


def halves(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float16)


def chosen(steps: list[Step]) -> list[str]:
    return [step.form.name.split()[0] for step in steps if isinstance(step, ContractionStep) and step.form is not None]


def loops(steps: list[Step]) -> list[str]:
    return [step.label for step in steps if isinstance(step, LoopStep)]


@pytest.mark.parametrize("form", ["library", "tile"])
def test_a_layer_with_a_bias_a_gelu_and_a_sum_is_one_step(form: str) -> None:
    made = steps_of(
        """g (float16[2,5,32] x, float16[32,24] w, float16[24] b, float16[2,5,24] z) => (float16[2,5,24] y) {
            p = MatMul(x, w)
            q = Add(b, p)
            r = Gelu(q)
            y = Add(r, z)
        }""",
        {"x": halves(2, 5, 32), "w": halves(32, 24, seed=1), "b": halves(24, seed=2), "z": halves(2, 5, 24, seed=3)},
        form,
    )
    assert chosen(made) == [form] and not loops(made)


@pytest.mark.parametrize("form", ["library", "tile"])
@pytest.mark.parametrize("attributes", ["transB = 1", "transA = 1, transB = 1, alpha = 0.5, beta = 2.0"])
def test_gemm(form: str, attributes: str) -> None:
    x = halves(20, 7) if "transA" in attributes else halves(7, 20)
    made = steps_of(
        f"""g (float16[{x.shape[0]},{x.shape[1]}] x, float16[9,20] w, float16[9] b)
            => (float16[7,9] y, float16[7,9] p) {{
            p = Gemm <{attributes}> (x, w, b)
            y = Relu(p)
        }}""",
        {"x": x, "w": halves(9, 20, seed=1), "b": halves(9, seed=2)},
        form,
    )
    assert chosen(made) == [form]


def test_a_product_alone_is_a_call_of_the_library() -> None:
    made = steps_of(
        "g (float16[3,8] x, float16[8,4] w, float16[4] b) => (float16[3,4] y) { p = MatMul(x, w) y = Add(p, b) }",
        {"x": halves(3, 8), "w": halves(8, 4, seed=1), "b": halves(4, seed=2)},
        "library",
    )
    (step,) = (step for step in made if isinstance(step, ContractionStep))
    assert step.form is not None and step.form.printed is None


@pytest.mark.parametrize("form", FORMS)
def test_a_residual_block_is_three_steps_with_channels_last(form: str) -> None:
    made = steps_of(
        """g (float16[2,16,6,5] x, float16[2,16,6,5] u, float16[16,16,3,3] v, float16[16] c, float16[24,16,3,3] w,
              float16[24] b, float16[24,16,1,1] s) => (float16[2,24,3,3] y) {
            a = Conv <pads = [1,1,1,1]> (x, v, c)
            r = Relu(a)
            d = Conv <strides = [2,2]> (u, s)
            e = Conv <strides = [2,2], pads = [1,1,1,1]> (r, w, b)
            t = Add(d, e)
            y = Relu(t)
        }""",
        {
            "x": halves(2, 16, 6, 5),
            "u": halves(2, 16, 6, 5, seed=1),
            "v": halves(16, 16, 3, 3, seed=2),
            "c": halves(16, seed=3),
            "w": halves(24, 16, 3, 3, seed=4),
            "b": halves(24, seed=5),
            "s": halves(24, 16, 1, 1, seed=6),
        },
        form,
        off=1e-2,
    )
    found = chosen(made)
    assert len(found) == 3 and found.count(form) >= 2


@pytest.mark.parametrize("form", ["fused", "library"])
def test_groups_and_uneven_pads_are_the_library_s(form: str) -> None:
    made = steps_of(
        """g (float16[1,8,7,7] x, float16[8,1,3,3] w, float16[8] b) => (float16[1,8,7,6] y) {
            a = Conv <group = 8, pads = [1,0,1,1]> (x, w, b)
            y = Relu(a)
        }""",
        {"x": halves(1, 8, 7, 7), "w": halves(8, 1, 3, 3, seed=1), "b": halves(8, seed=2)},
        form,
    )
    assert chosen(made) == [form]


def test_other_types_stay_with_torch() -> None:
    made = steps_of(
        "g (float[3,8] x, float[8,4] w) => (float[3,4] y) { p = MatMul(x, w) q = Exp(p) y = Neg(q) }",
        {"x": halves(3, 8).astype(np.float32), "w": halves(8, 4, seed=1).astype(np.float32)},
        "tile",
    )
    assert not chosen(made) and loops(made) == ["q + y"]


@pytest.mark.parametrize("form", ["library", "tile"])
@pytest.mark.parametrize(
    "after", ["y = MatMul(x, w)", "p = MatMul(x, w)\n y = Add(p, b)", "p = MatMul(x, w)\n y = Relu(p)"]
)
def test_rows_of_a_large_result_begin_at_whole_vectors(monkeypatch: pytest.MonkeyPatch, form: str, after: str) -> None:
    monkeypatch.setattr(realise, "_WIDE", 8)
    monkeypatch.setattr(realise, "_LARGE", 64)
    made = steps_of(
        f"g (float16[1,6,16] x, float16[16,21] w, float16[21] b) => (float16[1,6,21] y) {{ {after} }}",
        {"x": halves(1, 6, 16), "w": halves(16, 21, seed=1), "b": halves(21, seed=2)},
        form,
    )
    (product,) = [step for step in made if isinstance(step, ContractionStep)]
    assert product.work.out.strides[1:] == (24, 1) and not loops(made)


def test_a_result_that_is_read_again_may_have_such_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realise, "_WIDE", 8)
    monkeypatch.setattr(realise, "_LARGE", 64)
    made = steps_of(
        """g (float16[6,16] x, float16[16,21] w, float16[21,10] v)
            => (float16[6,21] y, float16[126] z, float16[6,10] u) {
            y = MatMul(x, w)
            shape = Constant<value_ints = [126]>()
            z = Reshape(y, shape)
            u = MatMul(y, v)
        }""",
        {"x": halves(6, 16), "w": halves(16, 21, seed=1), "v": halves(21, 10, seed=2)},
        "library",
        off=2e-2,
    )
    first = next(step for step in made if isinstance(step, ContractionStep))
    assert first.work.out.strides[1:] == (24, 1)
