"""What an LSTM does between two products, in one launch: a step forward, and a step back.

Gates lie as ONNX has them: input, output, forget, cell. Everything is float32, and rows lie one behind the other.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.codegen.triton.functions import lib  # type: ignore[attr-defined]
from ranvier.providers.cuda.kernels.jit import blocks, kernel

BLOCK = 128  # elements of a program: a step is small, so many programs share it


@kernel
def _forward(
    projected: tl.tensor,
    product: tl.tensor,
    before: tl.tensor,
    gates: tl.tensor,
    cell: tl.tensor,
    hidden: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    to = (at // size) * 4 * size + at % size
    i = tl.load(projected + to, mask=mask, other=0.0) + tl.load(product + to, mask=mask, other=0.0)
    o = tl.load(projected + to + size, mask=mask, other=0.0) + tl.load(product + to + size, mask=mask, other=0.0)
    third, fourth = to + 2 * size, to + 3 * size
    f = tl.load(projected + third, mask=mask, other=0.0) + tl.load(product + third, mask=mask, other=0.0)
    g = tl.load(projected + fourth, mask=mask, other=0.0) + tl.load(product + fourth, mask=mask, other=0.0)
    i, o, f, g = tl.sigmoid(i), tl.sigmoid(o), tl.sigmoid(f), lib.tanh(g)
    c = f * tl.load(before + at, mask=mask, other=0.0) + i * g
    tl.store(gates + to, i, mask=mask)
    tl.store(gates + to + size, o, mask=mask)
    tl.store(gates + third, f, mask=mask)
    tl.store(gates + fourth, g, mask=mask)
    tl.store(cell + at, c, mask=mask)
    tl.store(hidden + at, o * lib.tanh(c), mask=mask)


@kernel
def _back(
    gates: tl.tensor,
    cell: tl.tensor,
    before: tl.tensor,
    to_hidden: tl.tensor,
    to_result: tl.tensor,
    inner: tl.tensor,
    slopes: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    to = (at // size) * 4 * size + at % size
    third, fourth = to + 2 * size, to + 3 * size
    i = tl.load(gates + to, mask=mask, other=0.0)
    o = tl.load(gates + to + size, mask=mask, other=0.0)
    f = tl.load(gates + third, mask=mask, other=0.0)
    g = tl.load(gates + fourth, mask=mask, other=0.0)
    bent = lib.tanh(tl.load(cell + at, mask=mask, other=0.0))
    hidden = tl.load(to_hidden + at, mask=mask, other=0.0)
    if to_result is not None:
        hidden += tl.load(to_result + at, mask=mask, other=0.0)
    within = tl.load(inner + at, mask=mask, other=0.0) + hidden * o * (1.0 - bent * bent)
    earlier = tl.load(before + at, mask=mask, other=0.0)
    tl.store(slopes + to, within * g * i * (1.0 - i), mask=mask)
    tl.store(slopes + to + size, hidden * bent * o * (1.0 - o), mask=mask)
    tl.store(slopes + third, within * earlier * f * (1.0 - f), mask=mask)
    tl.store(slopes + fourth, within * i * (1.0 - g * g), mask=mask)
    tl.store(inner + at, within * f, mask=mask)


def forward(
    projected: torch.Tensor,
    product: torch.Tensor,
    before: torch.Tensor,
    gates: torch.Tensor,
    cell: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Gates, cell and result of a step, from the two products ``[batch, 4 · size]`` and the cell before."""
    count = cell.numel()
    grid = (blocks(count, BLOCK),)
    _forward[grid](projected, product, before, gates, cell, hidden, count, cell.shape[1], BLOCK=BLOCK, num_warps=4)


def back(
    gates: torch.Tensor,
    cell: torch.Tensor,
    before: torch.Tensor,
    to_hidden: torch.Tensor,
    to_result: torch.Tensor | None,
    inner: torch.Tensor,
    slopes: torch.Tensor,
) -> None:
    """Gradients of the sums that entered the gates. ``inner``, that of the cell, becomes the one of the cell before;
    ``to_hidden`` comes from the step behind, ``to_result`` from whoever read the result."""
    count = cell.numel()
    grid = (blocks(count, BLOCK),)
    given = (gates, cell, before, to_hidden, to_result, inner, slopes)
    _back[grid](*given, count, cell.shape[1], BLOCK=BLOCK, num_warps=4)
