"""What a decoding step makes of its inputs first, one launch each: rows of a table, and lengths that fit the cache.

Nothing here reads outside of a tensor, whatever the inputs say; the byte ``fine`` is 1 where they were right.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.jit import blocks, kernel, power_of_two

BLOCK = 1024  # elements of a row


@kernel
def _rows(
    table: tl.tensor,
    chosen: tl.tensor,
    out: tl.tensor,
    fine: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    table_step: tl.tensor,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(chosen + token).to(tl.int64)
    row = tl.where(row < 0, row + rows, row)
    row = tl.minimum(tl.maximum(row, 0), rows - 1)
    value = tl.load(table + row * table_step + at, mask=at < width, other=0.0)
    tl.store(out + token * width + at, value, mask=at < width)
    if (token == 0) & (tl.program_id(1) == 0):
        lane = tl.arange(0, LANES)
        every = tl.load(chosen + lane, mask=lane < count, other=0).to(tl.int64)
        wrong = tl.max(tl.where((every >= -rows) & (every < rows), 0, 1), axis=0)
        tl.store(fine, (wrong == 0).to(tl.uint8))


@kernel
def _lengths(
    last: tl.tensor, out: tl.tensor, fine: tl.tensor, count: tl.tensor, most: tl.tensor, LANES: tl.constexpr
) -> None:
    lane = tl.arange(0, LANES)
    mask = lane < count
    given = tl.load(last + lane, mask=mask, other=0).to(tl.int32)
    inside = tl.minimum(tl.maximum(given, 0), most - 1)
    tl.store(out + lane, inside + 1, mask=mask)
    wrong = tl.max(tl.where(given == inside, 0, 1), axis=0)
    tl.store(fine, (wrong == 0).to(tl.uint8))


def look_up(table: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    """Rows of a table ``[rows, width]`` by numbers ``[M]``, negative ones from the end."""
    rows, width = table.shape
    count = chosen.numel()
    step = min(BLOCK, power_of_two(width))
    _rows[(count, blocks(width, step))](
        table,
        chosen,
        out,
        fine,
        count,
        rows,
        width,
        table.stride(0),
        BLOCK=step,
        LANES=power_of_two(count),
        num_warps=4,
    )
    return out


def lengths_after(last: torch.Tensor, most: int, out: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    """Of sequences whose newest token is at positions ``last``, the lengths: at least 1, and ``most`` at most."""
    count = last.numel()
    _lengths[(1,)](last, out, fine, count, most, LANES=power_of_two(count), num_warps=1)
    return out
