"""Rows as codes of 8 bits with a scale for each: how a kernel's result leaves it when a product of codes comes next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.device import LEAST, float8, int8_codes, let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import kernel, power_of_two

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Codes:
    """Where codes ``[M, N]`` (int8, or a float of 8 bits) and their float32 scales ``[M]`` go.

    A scale is what codes are multiplied by to get values; with ``inverse`` it is what values were multiplied by, as
    BitLinear wants it.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    inverse: bool = False

    @property
    def largest(self) -> float:
        return LARGEST[self.codes.dtype]

    @staticmethod
    def empty(m: int, n: int, dtype: torch.dtype, device: torch.device | str, *, inverse: bool = False) -> Codes:
        scale = torch.empty(m, dtype=torch.float32, device=device)
        return Codes(torch.empty((m, n), dtype=dtype, device=device), scale, inverse)


@kernel
def store_codes(
    value: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    step: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    largest: tl.tensor,
    INVERSE: tl.constexpr,
) -> None:
    """One row, all of it in ``value``; elements that ``mask`` leaves out must be 0.

    A row with a NaN or an infinity gets a scale of NaN, so that all that is made of it is NaN, whatever its codes are.
    """
    reach = tl.maximum(tl.max(tl.abs(value), axis=0), LEAST)
    unsound = tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), axis=0)
    most = reach * 0.0 + largest
    by = tl.div_rn(most, reach)
    kept = by if INVERSE else tl.div_rn(reach, most)
    tl.store(scale + row, tl.where(unsound == 0, kept, float("nan")))
    to = codes + row * step + at
    if codes.dtype.element_ty == tl.int8:
        tl.store(to, int8_codes(value, by), mask=mask)
    else:
        inside = tl.minimum(tl.maximum(value * by, -largest), largest)
        tl.store(to, float8(inside, codes.dtype.element_ty), mask=mask)


@kernel
def _quantize(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    x_step: tl.tensor,
    codes_step: tl.tensor,
    largest: tl.tensor,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < n
    let_next_start(PDL)
    wait_for_inputs(PDL)
    value = tl.load(x + row * x_step + at, mask=mask, other=0.0).to(tl.float32)
    store_codes(value, codes, scale, row, codes_step, at, mask, largest, INVERSE)


def row_warps(block: int) -> int:
    """Enough threads for 16 elements each, and no more than a program may have."""
    return max(1, min(16, block // 512))


def quantize(x: torch.Tensor, out: Codes, *, pdl: bool = False) -> Codes:
    """Rows of x ``[M, N]`` as codes. Products are rounded before they become codes, so fusing them is forbidden."""
    m, n = x.shape
    block = power_of_two(n)
    _quantize[(m,)](
        x,
        out.codes,
        out.scale,
        n,
        x.stride(0),
        out.codes.stride(0),
        out.largest,
        BLOCK=block,
        INVERSE=out.inverse,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return out
