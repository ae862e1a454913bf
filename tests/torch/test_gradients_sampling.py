"""Gradients of samples, transforms, scattering and quantization against those of torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Array, Case, graph_of, op_of, r, run
from tests.passes.test_differentiate_contrib import fused

torch = pytest.importorskip("torch")
F = torch.nn.functional


def gradients(case: Case) -> tuple[list[Array], Array]:
    graph, values, y, seed = graph_of(case)
    grads = differentiate(graph, [(y, seed)], values)
    assert all(g is not None for g in grads)
    graph.outputs = [g for g in grads if g is not None]
    weights = r(*seed.type.shape, seed=9)  # type: ignore[union-attr, misc]
    return run(graph, {f"x{k}": a for k, a in enumerate(case.inputs)} | {"seed": weights}), weights


def compare(case: Case, theirs: Any) -> None:
    found, weights = gradients(case)
    given = [torch.tensor(a, requires_grad=True) for a in case.inputs]
    (theirs(*given) * torch.tensor(weights)).sum().backward()
    for own, each in zip(found, given):
        np.testing.assert_allclose(own, each.grad.numpy(), rtol=1e-9, atol=1e-9)


MODES = list(itertools.product(("bilinear", "bicubic"), ("zeros", "border", "reflection"), (False, True)))


@pytest.mark.parametrize(("mode", "padding", "align"), MODES)
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    given = [r(2, 3, 4, 5), r(2, 3, 4, 2, low=-1.4, high=1.4)]
    own = {"bilinear": "linear", "bicubic": "cubic"}[mode]
    case = Case(op_of("GridSample", mode=own, padding_mode=padding, align_corners=int(align)), given)
    compare(case, lambda x, g: F.grid_sample(x, g, mode, padding, align))


def test_transforms() -> None:
    window = r(8, low=0.1, high=1.0)

    def theirs(x: Any) -> Any:
        made = torch.stft(x[..., 0], 8, 4, 8, torch.tensor(window), center=False, return_complex=True)
        return torch.view_as_real(made.transpose(1, 2))

    case = Case(
        lambda op, x, w: op.STFT(x, np.asarray(4), w, np.asarray(8)), [r(2, 24, 1)], [window], shape=(2, 5, 5, 2)
    )
    compare(case, theirs)


def test_fold() -> None:
    case = Case(op_of("Col2Im", np.array([5, 6]), np.array([2, 3]), strides=[1, 2], pads=[1, 0, 1, 0]), [r(2, 12, 12)])
    compare(case, lambda x: F.fold(x, (5, 6), (2, 3), padding=(1, 0), stride=(1, 2)))


@pytest.mark.parametrize(("how", "name"), [("mul", "prod"), ("max", "amax"), ("min", "amin")])
def test_scattering(how: str, name: str) -> None:
    places = np.array([[0, 2, 2, 1], [3, 0, 0, 3]])
    case = Case(lambda op, x, u, i: op.ScatterElements(x, i, u, axis=1, reduction=how), [r(2, 5), r(2, 4)], [places])
    compare(case, lambda x, u: x.scatter_reduce(1, torch.tensor(places), u, name))


def test_fused_attention() -> None:
    given = [r(2, 5, 6), r(2, 5, 6, seed=1), r(2, 5, 6, seed=2)]

    def theirs(*given: Any) -> Any:
        q, k, v = (x.reshape(2, 5, 3, 2).transpose(1, 2) for x in given)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 6)

    compare(Case(fused("MultiHeadAttention", num_heads=3, unidirectional=1), given), theirs)


def test_rounding_to_codes() -> None:
    scale, zero = np.float64(0.01), np.int8(7)

    def both(op: Any, x: Any) -> Any:
        return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale, zero)

    compare(Case(both, [r(6, 7)]), lambda x: torch.fake_quantize_per_tensor_affine(x, 0.01, 7, -128, 127))
