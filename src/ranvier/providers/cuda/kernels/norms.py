"""RMSNorm and LayerNorm with what stands around them: the residual sum before, codes of 8 bits after; one pass."""

from __future__ import annotations

import torch
import triton.language as tl

from ranvier.providers.cuda.kernels.codes import Codes, row_warps, store_codes
from ranvier.providers.cuda.kernels.device import let_next_start, wait_for_inputs
from ranvier.providers.cuda.kernels.jit import kernel, power_of_two


@kernel
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    n: tl.tensor,
    x_step: tl.tensor,
    residual_step: tl.tensor,
    total_step: tl.tensor,
    out_step: tl.tensor,
    codes_step: tl.tensor,
    eps: tl.tensor,
    largest: tl.tensor,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < n
    let_next_start(PDL)
    gain = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + row * x_step + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_step + at, mask=mask, other=0.0).to(tl.float32)
    if total is not None:
        tl.store(total + row * total_step + at, value.to(total.dtype.element_ty), mask=mask)
    if CENTRED:
        value = tl.where(mask, value - tl.sum(value, axis=0) / n, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / n + eps) * gain
    if bias is not None:
        value += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    if out is not None:
        tl.store(out + row * out_step + at, value.to(out.dtype.element_ty), mask=mask)
    if codes is not None:
        store_codes(value, codes, scale, row, codes_step, at, mask, largest, INVERSE)


def _step(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    codes: Codes | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    eps: float = 1e-5,
    centred: bool = False,
    pdl: bool = False,
) -> None:
    """The norm of rows of ``x + residual`` into ``out``, ``codes`` or both; the sum itself into ``total`` (may be x).

    RMSNorm, or with ``centred`` LayerNorm.
    """
    m, n = x.shape
    block = power_of_two(n)
    _norm[(m,)](
        x,
        residual,
        weight,
        bias,
        total,
        out,
        codes.codes if codes else None,
        codes.scale if codes else None,
        n,
        x.stride(0),
        _step(residual),
        _step(total),
        _step(out),
        _step(codes.codes if codes else None),
        eps,
        codes.largest if codes else 0.0,
        BLOCK=block,
        CENTRED=centred,
        INVERSE=codes is not None and codes.inverse,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=codes is None,
        launch_pdl=pdl,
    )
