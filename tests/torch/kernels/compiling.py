"""Builds every kernel for capability 9.0 on a machine without a GPU: the interpreter takes what compilers refuse.

Launches are turned into compilations by standing in for the driver. Run by test_compiled, in a process of its own
because triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ranvier.providers.cuda.kernels import (
    codes,
    decode_attention,
    experts,
    first,
    fp8,
    gemv,
    int4,
    lstm,
    norms,
    rope_append,
    swiglu,
    ternary,
    visits,
    w4a16,
    w8a8,
)
from ranvier.providers.cuda.kernels.expert_weights import CODINGS, Experts

MODULES = (
    *(codes, decode_attention, experts, first, fp8, gemv, lstm, norms, rope_append, swiglu, ternary, visits),
    *(w4a16, w8a8),
)
CALLED_BY_KERNELS = {
    *("decode_attention._join", "decode_attention._tile"),
    *(f"experts.{name}" for name in ("_pair", "_whole", "_small_floats", "_number", "_opened", "_column")),
    *(f"w4a16.{name}" for name in ("_row_at", "_chunk_at", "_word_at", "_beside_at")),
}
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_all() -> None:
    x, w, g = zeros(1, 256), zeros(64, 256), zeros(256)
    tokens, fine = torch.zeros(2, dtype=torch.int64), zeros(1, dtype=torch.uint8)
    first.look_up(w, tokens, zeros(2, 256), fine)
    first.lengths_after(tokens, 16, torch.zeros(2, dtype=torch.int32), fine)
    gemv.gemv(x, (w, w, w), zeros(1, 192), norm=g, bias=zeros(192), residual=zeros(1, 192), activation="gelu", pdl=True)
    gemv.gated_gemv(x, w, w, zeros(1, 64), norm=g, pdl=True)
    q, k, cache = zeros(2, 8, 64), zeros(2, 2, 64), zeros(4, 16, 2, 64)
    angles, table, lengths = (
        torch.zeros(32, 32),
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    new = decode_attention.NewToken(k, k, angles, angles)
    for fused in (True, False):
        decode_attention.decode_attention(
            q, cache, cache, lengths, q, splits=2, new=new, table=table, softcap=30.0, window=9, fused=fused, pdl=True
        )
    decode_attention.decode_attention(q[:, :2], cache[:2], cache[:2], lengths, q[:, :2], splits=2)
    rope_append.rope_append(q, k, k, lengths, angles, angles, q, cache, cache, table=table, pdl=True)
    wide, narrow = torch.zeros(3, 32), torch.zeros(3, 8)
    lstm.forward(wide, wide, narrow, wide, narrow, narrow)
    for result in (narrow, None):
        lstm.back(wide, narrow, narrow, narrow, result, narrow, wide)
    for dtype in (torch.int8, E4M3):
        out = codes.Codes.empty(1, 256, dtype, "cpu")
        codes.quantize(x, out)
        norms.norm(x, g, out=x, codes=out, bias=g, residual=x, total=x, centred=True)
        swiglu.swiglu(x, x, out=x, codes=out)
    scales = zeros(64, 2)
    four = int4.pack(zeros(64, 2, 64, dtype=torch.uint8), scales, 256, 128, zeros(64, 1, dtype=torch.uint8))
    w4a16.gemv(x, four, zeros(1, 32), norm=g, gated=True, activation="silu", pdl=True)
    w4a16.gemm(zeros(32, 256), four, zeros(32, 64))
    w4a16.unpack(four, w)
    eight, one = zeros(64, 256, dtype=torch.int8), torch.zeros(64)
    w8a8.gemv(eight[:1], one, eight, one, zeros(1, 64), pdl=True)
    w8a8.gemm(eight, one, eight, one, zeros(64, 64))
    three = ternary.pack(zeros(64, 64, dtype=torch.uint8), one, 256)
    ternary.gemv(eight[:1], one, three, zeros(1, 64), pdl=True)
    ternary.gemm(eight, one, three, zeros(64, 64))
    small = w.to(E4M3)
    fp8.gemv(x, small, torch.zeros(1, 2), zeros(1, 64), pdl=True)
    fp8.gemm(small, small, torch.zeros(1, 2), zeros(64, 64), x_scale=torch.zeros(64, 2))
    fp8.gemm(w, small, one, zeros(64, 64))
    layers_of_experts()


def layers_of_experts() -> None:
    x, chosen, shares = zeros(2, 256), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    visits.route(zeros(2, 4), zeros(2, 4), x, chosen, shares, normalize=True, laid=x, planes=8)
    owners = torch.zeros(visits.most_blocks(4, 4, 16), dtype=torch.int32)
    order = torch.zeros(len(owners) * 16, dtype=torch.int32)
    visits.sort(chosen, order, owners, 4, 16)
    for coding, between in (*((coding, False) for coding in CODINGS), ("int4", True)):
        bits = CODINGS[coding]
        weights = zeros(4, 64, 256 * bits // 8, dtype=torch.uint8) if bits else zeros(4, 64, 256)
        scales = zeros(4, 64, 8) if bits else None
        taken = zeros(4, 64, 8, dtype=torch.float32) if between else None
        layer = Experts(coding, weights, 64, 256, 32 if bits else 256, scales, zeros=taken, bias=zeros(4, 64))
        opening = experts.Opening("swiglu", 1, planes=layer.planes)
        experts.few(x, layer, chosen, zeros(4, 32), shared=2, opening=opening)
        experts.few(zeros(4, 256), layer, chosen, zeros(2, 64), shares=shares)
        tile = experts.matrix_tile(4, 4, layer.planes, BF16)
        experts.many(x, layer, order, owners, zeros(4, 32), shared=2, opening=opening, tile=tile)
    experts.added(torch.zeros(4, 64), shares, zeros(2, 64))


def main() -> None:
    built: set[str] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        built.add(f"{self.__module__.rsplit('.', 1)[1]}.{self.fn.__name__}")
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(NoDevice())
    launch_all()
    kernels = {
        f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.startswith("_")
    }
    missing = kernels - built - CALLED_BY_KERNELS
    if missing or len(built) < 15:
        sys.exit(f"not built: {sorted(missing)}; built {sorted(built)}")


if __name__ == "__main__":
    main()
