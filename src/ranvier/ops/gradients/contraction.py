"""Gradients of products and convolutions: products and convolutions again."""

from __future__ import annotations

import string

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, gradient, operand


def _turned(b: Backward, x: Value) -> Value:
    rank = b.rank(x)
    return b.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


@gradient("MatMul")
def _matmul(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, (x, y) = grads[0], node.inputs
    assert grad is not None and x is not None and y is not None
    p, q = b.rank(x), b.rank(y)
    left = x if p > 1 else b.Unsqueeze(x, b.whole(0))
    right = y if q > 1 else b.Unsqueeze(y, b.whole(1))
    wide = grad
    if q == 1:
        wide = b.Unsqueeze(wide, b.whole(-1))
    if p == 1:
        wide = b.Unsqueeze(wide, b.whole(-2))
    to_left = b.sum_to(b.MatMul(wide, _turned(b, right)), left, own=2)
    if q == 2 and p > 2:
        # one product over all rows of the batch instead of a sum of products
        inner, outer = b.dims(x)[-1], b.dims(y)[-1]
        if isinstance(inner, int) and isinstance(outer, int):
            rows = b.Reshape(x, b.whole(-1, inner))
            slopes = b.Reshape(wide, b.whole(-1, outer))
            return [to_left, b.MatMul(b.Transpose(rows, perm=[1, 0]), slopes)]
    to_right = b.sum_to(b.MatMul(_turned(b, left), wide), right, own=2)
    return [b.like(to_left, x) if p == 1 else to_left, b.like(to_right, y) if q == 1 else to_right]


@gradient("Gemm")
def _gemm(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x, y = grads[0], node.inputs[0], node.inputs[1]
    assert grad is not None and x is not None and y is not None
    left, right = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))

    def product(p: Value, q: Value, turn_p: bool, turn_q: bool) -> Value:
        return b.Gemm(p, q, alpha=alpha, transA=int(turn_p), transB=int(turn_q))

    to_x = product(y, grad, right, True) if left else product(grad, y, False, not right)
    to_y = product(grad, x, True, left) if right else product(x, grad, not left, False)
    found: list[Value | None] = [to_x, to_y]
    bias = operand(node, 2)
    if bias is not None:
        summed = b.sum_to(grad, bias)
        found.append(summed if beta == 1.0 else b.Mul(summed, b.number(beta, grad)))
    elif len(node.inputs) > 2:
        found.append(None)
    return found


@gradient("Einsum")
def _einsum(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """An operand's gradient is the product of the others with the result's, summed over what the operand lacks."""
    grad = grads[0]
    assert grad is not None
    terms, result = _terms(b, node)
    longer: dict[str, bool] = {}  # whether a letter stands for more than one element
    for spelled, value in zip(terms, node.inputs):
        for c, d in zip(spelled, b.dims(value) if value is not None else ()):
            longer[c] = longer.get(c, False) or d != 1
    found: list[Value | None] = []
    for k, (term, value) in enumerate(zip(terms, node.inputs)):
        assert value is not None
        others = [(t, v) for j, (t, v) in enumerate(zip(terms, node.inputs)) if j != k]
        have = set(result).union(*(t for t, _ in others))
        kept = "".join(c for c in dict.fromkeys(term) if c in have)
        operands = [grad, *(v for _, v in others)]
        equation = ",".join([result, *(t for t, _ in others)]) + "->" + kept
        part = b.node("Einsum", operands, {"equation": equation}).output
        # letters that were summed over in this operand alone, and those that name a diagonal of it
        lost = [j for j, c in enumerate(term) if c not in have or c in term[:j]]
        if lost:
            part = b.Unsqueeze(part, b.whole(*lost))
            if len(set(term)) != len(term):
                part = b.Mul(part, b.constant(_diagonal(term, b.sizes(value)).astype(b.dtype(grad).numpy)))
            if any(c not in have for c in term):
                part = b.Expand(part, b.shape(value))
        repeated = [j for j, (c, d) in enumerate(zip(term, b.dims(value))) if d == 1 and longer[c]]
        found.append(b.ReduceSum(part, b.whole(*repeated), keepdims=1) if repeated else part)
    return found


def _terms(b: Backward, node: Node) -> tuple[list[str], str]:
    """The letters of each operand and of the result; dots become letters of their own, counted from the last."""
    equation = node.attrs["equation"]
    text = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = ("..." if "." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    free = [c for c in string.ascii_letters if c not in text]
    ranks = [b.rank(v) - len(t) + 3 if "..." in t and v is not None else 0 for t, v in zip(terms, node.inputs)]
    names = "".join(free[: max(ranks)])
    spelled = [t.replace("...", names[len(names) - rank :]) for t, rank in zip(terms, ranks)]
    return spelled, result.replace("...", names)


def _diagonal(term: str, sizes: tuple[int, ...]) -> np.ndarray:
    """One where all places of one letter are equal, zero elsewhere."""
    places = np.indices([size if term.count(c) > 1 else 1 for c, size in zip(term, sizes)])
    same = [places[j] == places[term.index(c)] for j, c in enumerate(term)]
    return np.asarray(np.logical_and.reduce(same))


def window_of(b: Backward, node: Node, x: Value, w: Value) -> tuple[list[int], list[int], list[int], int]:
    """Strides, dilations, pads and groups of a convolution in numbers."""
    rank = b.rank(x) - 2
    strides = [int(s) for s in attribute(node, "strides", [1] * rank)]
    dilations = [int(d) for d in attribute(node, "dilations", [1] * rank)]
    pads = [int(p) for p in attribute(node, "pads", [0] * (2 * rank))]
    auto = attribute(node, "auto_pad", "NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto not in ("NOTSET", "VALID"):
        kernel, sizes = b.sizes(w)[2:], b.sizes(x)[2:]
        for k in range(rank):
            results = -(-sizes[k] // strides[k])
            total = max(0, (results - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1 - sizes[k])
            small, large = total // 2, total - total // 2
            pads[k], pads[rank + k] = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        pads = [0] * (2 * rank)
    return strides, dilations, pads, int(attribute(node, "group", 1))


@gradient("Conv")
def _conv(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x, w = grads[0], node.inputs[0], node.inputs[1]
    assert grad is not None and x is not None and w is not None
    strides, dilations, pads, group = window_of(b, node, x, w)
    rank = len(strides)
    sizes, kernel, results = b.sizes(x)[2:], b.sizes(w)[2:], b.sizes(node.output)[2:]
    rest = [
        sizes[k] + pads[k] + pads[rank + k] - ((results[k] - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1)
        for k in range(rank)
    ]
    to_x = b.ConvTranspose(grad, w, strides=strides, dilations=dilations, pads=pads, output_padding=rest, group=group)
    found: list[Value | None] = [to_x, _weight_gradient(b, grad, x, w, strides, dilations, pads, group, rest)]
    if len(node.inputs) > 2:
        found.append(b.ReduceSum(grad, b.whole(0, *range(2, rank + 2)), keepdims=0))
    return found


def _weight_gradient(
    b: Backward,
    grad: Value,
    x: Value,
    w: Value,
    strides: list[int],
    dilations: list[int],
    pads: list[int],
    group: int,
    rest: list[int],
) -> Value:
    """A convolution of the input by the gradient: batches become channels, steps become dilations and the other way."""
    rank = len(strides)
    batch, _, *sizes = b.sizes(x)
    inner = b.sizes(w)[1]
    swap = [1, 0, *range(2, rank + 2)]
    if group == 1:
        left, right = b.Transpose(x, perm=swap), b.Transpose(grad, perm=swap)
    else:
        # [group, inner, batch] as images and [outputs] as kernels of a convolution with as many groups
        apart = b.Reshape(x, b.whole(batch, group, inner, *sizes))
        moved = b.Transpose(apart, perm=[2, 1, 0, *range(3, rank + 3)])
        left = b.Reshape(moved, b.whole(inner, group * batch, *sizes))
        right = b.Transpose(grad, perm=swap)
    ends = [pads[rank + k] - rest[k] for k in range(rank)]
    if any(e < 0 for e in ends):  # what no window reached
        cut = [min(0, e) for e in ends]
        stops = [s + c for s, c in zip(sizes, cut)]
        left = b.Slice(left, b.whole(*[0] * rank), b.whole(*stops), b.whole(*range(2, rank + 2)))
        ends = [max(0, e) for e in ends]
    made = b.Conv(left, right, strides=dilations, dilations=strides, pads=[*pads[:rank], *ends], group=group)
    return b.Transpose(made, perm=swap)


@gradient("ConvTranspose")
def _conv_transpose(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """The other way round: its input's gradient is a convolution."""
    grad, x, w = grads[0], node.inputs[0], node.inputs[1]
    assert grad is not None and x is not None and w is not None
    rank = b.rank(x) - 2
    strides = [int(s) for s in attribute(node, "strides", [1] * rank)]
    dilations = [int(d) for d in attribute(node, "dilations", [1] * rank)]
    pads = [int(p) for p in attribute(node, "pads", [0] * (2 * rank))]
    group = int(attribute(node, "group", 1))
    rest = [int(p) for p in attribute(node, "output_padding", [0] * rank)]
    to_x = b.Conv(grad, w, strides=strides, dilations=dilations, pads=pads, group=group)
    if any(rest):
        sizes = b.sizes(x)[2:]
        to_x = b.Slice(to_x, b.whole(*[0] * rank), b.whole(*sizes), b.whole(*range(2, rank + 2)))
    to_w = _weight_gradient(b, x, grad, w, strides, dilations, pads, group, rest)
    found: list[Value | None] = [to_x, to_w]
    if len(node.inputs) > 2:
        found.append(b.ReduceSum(grad, b.whole(0, *range(2, rank + 2)), keepdims=0))
    return found
