"""``activation(gate) * up`` of two tensors, or of the halves of one; as values, or as codes of 8 bits for each row."""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.codes import Codes, row_warps, store_codes
from ranvier.providers.cuda.kernels.device import activated, let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import blocks, kernel, power_of_two

BLOCK = 2048  # of a row that has not to be seen whole


@kernel
def _swiglu(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    gate_step: tl.tensor,
    up_step: tl.tensor,
    out_step: tl.tensor,
    codes_step: tl.tensor,
    largest: tl.tensor,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    let_next_start(PDL)
    wait_for_inputs(PDL)
    left = tl.load(gate + row * gate_step + at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_step + at, mask=mask, other=0.0).to(tl.float32)
    value = activated(left, ACTIVATION) * right
    if out is not None:
        tl.store(out + row * out_step + at, value.to(out.dtype.element_ty), mask=mask)
    if codes is not None:
        store_codes(value, codes, scale, row, codes_step, at, mask, largest, INVERSE)


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    codes: Codes | None = None,
    activation: str = "silu",
    pdl: bool = False,
) -> None:
    """gate and up ``[M, n]``, or gate alone ``[M, 2n]`` with the up projection as its second half."""
    m = gate.shape[0]
    n = gate.shape[1] if up is not None else gate.shape[1] // 2
    right = gate[:, n:] if up is None else up
    whole = power_of_two(n)
    block = whole if codes is not None else min(BLOCK, whole)
    _swiglu[(m, blocks(n, block))](
        gate,
        right,
        out,
        codes.codes if codes else None,
        codes.scale if codes else None,
        n,
        gate.stride(0),
        right.stride(0),
        0 if out is None else out.stride(0),
        codes.codes.stride(0) if codes else 0,
        codes.largest if codes else 0.0,
        BLOCK=block,
        ACTIVATION=activation,
        INVERSE=codes is not None and codes.inverse,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=codes is None,
        launch_pdl=pdl,
    )
