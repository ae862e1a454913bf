"""Matrix products. Halves are summed as float32 by the libraries that torch calls."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import ShapeMismatch
from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.table import CONTRIB, FLOATS, INTEGERS, Call, lowers

TYPES = FLOATS | INTEGERS | {DType.uint64}
_WHOLE_BITS = 53  # of numbers that float64 holds
_ROOM = 1 << 24  # products of whole numbers at a time


def whole_product(a: Any, b: Any, *, native: bool | None = None) -> Any:
    """``a @ b`` of whole numbers, exact modulo 2⁶⁴, as int64. GPUs have no such product (``native``): there float64
    multiplies where it holds every sum, and else columns times rows are added up, some at a time."""
    if a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise ShapeMismatch(f"matrices {list(a.shape)} and {list(b.shape)} do not multiply")
    if a.device.type == "cpu" if native is None else native:
        return torch.matmul(a.to(torch.int64), b.to(torch.int64))
    if 8 * (a.element_size() + b.element_size()) + max(1, a.shape[-1]).bit_length() <= _WHOLE_BITS:
        return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64)
    left, right = (a if a.ndim > 1 else a[None]).to(torch.int64), (b if b.ndim > 1 else b[:, None]).to(torch.int64)
    total = left.new_zeros(*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    step = max(1, _ROOM // max(1, total.numel()))
    for start in range(0, left.shape[-1], step):
        stop = min(start + step, left.shape[-1])
        total = total + (left[..., start:stop, None] * right[..., None, start:stop, :]).sum(dim=-2)
    total = total if a.ndim > 1 else total[..., 0, :]
    return total if b.ndim > 1 else total[..., 0]


def product(call: Call, a: Any, b: Any, bias: Any = None) -> Any:
    """``a @ b`` with an optional row added; in fewer bits where the session allows it."""
    if not a.dtype.is_floating_point:
        y = whole_product(a, b)
        return y if bias is None else y + bias
    if call.low is not None and a.dtype == torch.float32:
        a, b = a.to(call.low), b.to(call.low)
        y = torch.matmul(a, b).to(torch.float32)
        return y if bias is None else y + bias
    if bias is not None and b.ndim == 2 and bias.ndim == 1:
        return functional.linear(a, b.mT, bias)
    y = torch.matmul(a, b)
    return y if bias is None else y + bias


@lowers("MatMul", types=TYPES)
def matmul(call: Call, a: Any, b: Any) -> Any:
    return product(call, a, b)


def gemm_of(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    if call.flag("transA"):
        a = a.mT
    if call.flag("transB"):
        b = b.mT
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    if a.dtype.is_floating_point and alpha == 1.0 and beta == 1.0 and c is not None and c.ndim == 1:
        return product(call, a, b, c) if c.shape[0] == b.shape[1] else product(call, a, b) + c
    y = product(call, a, b)
    if alpha != 1.0:
        y = y * alpha
    if c is not None and beta != 0.0:
        y = y + (c if beta == 1.0 else c * beta)
    return y


@lowers("Gemm", types=TYPES)
def gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    return gemm_of(call, a, b, c)


_ACTIVATIONS = {
    "Relu": lambda y, p: torch.relu(y),
    "Tanh": lambda y, p: torch.tanh(y),
    "Sigmoid": lambda y, p: torch.sigmoid(y),
    "LeakyRelu": lambda y, p: functional.leaky_relu(y, p[0] if p else 0.01),
    "Clip": lambda y, p: torch.clamp(y, p[0], p[1]),
    "HardSigmoid": lambda y, p: torch.clamp(y * (p[0] if p else 0.2) + (p[1] if len(p) > 1 else 0.5), 0, 1),
    "Elu": lambda y, p: functional.elu(y, p[0] if p else 1.0),
    "Softplus": lambda y, p: torch.logaddexp(y, torch.zeros_like(y)),
    "Softsign": lambda y, p: y / (1 + y.abs()),
    "Celu": lambda y, p: functional.celu(y, p[0] if p else 1.0),
    "ThresholdedRelu": lambda y, p: torch.where(y > (p[0] if p else 1.0), y, torch.zeros_like(y)),
    "Identity": lambda y, p: y,
    "HardSwish": lambda y, p: y * torch.clamp(y / 6 + 0.5, 0, 1),
    "": lambda y, p: y,
}


def activated(y: Any, name: str, parameters: Any) -> Any:
    return _ACTIVATIONS[name or ""](y, list(parameters or ()))


def unknown_activation(node: Node) -> str | None:
    name = node.attrs.get("activation", "")
    return None if name in _ACTIVATIONS else f"the activation {name!r} is not lowered to torch"


@lowers("FusedGemm", domain=CONTRIB, refuses=unknown_activation)
def fused_gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    given = [call.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return activated(gemm_of(call, a, b, c), call.attr("activation", ""), [p for p in given if p is not None])


def _turned(x: Any, swap: bool, batch: bool) -> Any:
    """An operand whose matrix axes are swapped, or whose first axis stands between them."""
    if batch and x.ndim > 2:
        x = x.movedim(0, -2)
    return x.mT if swap and x.ndim > 1 else x


def fused_product(call: Call, a: Any, b: Any) -> Any:
    a = _turned(a, call.flag("transA"), call.flag("transBatchA"))
    b = _turned(b, call.flag("transB"), call.flag("transBatchB"))
    y = product(call, a, b)
    alpha = call.attr("alpha", 1.0)
    return y if alpha == 1.0 else y * alpha


@lowers("FusedMatMul", "TransposeMatMul", domain=CONTRIB)
def fused_matmul(call: Call, a: Any, b: Any) -> Any:
    return fused_product(call, a, b)


@lowers("FusedMatMulActivation", domain=CONTRIB, refuses=unknown_activation)
def fused_matmul_activation(call: Call, a: Any, b: Any) -> Any:
    given = [call.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return activated(fused_product(call, a, b), call.attr("activation", ""), [p for p in given if p is not None])


@lowers("GemmFastGelu", domain=CONTRIB)
def gemm_fast_gelu(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    y = product(call, x, w)
    return functional.gelu(y if bias is None else y + bias, approximate="tanh")


@lowers("Einsum", since=12, types=TYPES)
def einsum(call: Call, *operands: Any) -> Any:
    equation = call.attr("equation").replace(" ", "")
    if operands[0].dtype.is_floating_point or operands[0].device.type == "cpu":
        return torch.einsum(equation, *operands)
    return torch.einsum(equation, *[x.to(torch.float64) for x in operands]).to(torch.int64)  # which wraps, as sums do
