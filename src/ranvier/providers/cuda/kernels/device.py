"""Functions of one value that several kernels call."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra import cuda as machine

from ranvier.providers.cuda.kernels.jit import interpreted, kernel

LEAST = tl.constexpr(1e-5)  # the largest magnitude of a token counts as at least this, as BitLinear defines
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it and taken off again is a whole number
ONES = tl.constexpr(0x01010101)
INTERPRETED = tl.constexpr(interpreted())


@kernel
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """What stands above it may run before the launch before this one has ended: reading weights, say."""
    if PDL:
        machine.gdc_wait()


@kernel
def let_next_start(PDL: tl.constexpr) -> None:
    """The next launch may take multiprocessors that are free; it waits for this one's results by itself."""
    if PDL:
        machine.gdc_launch_dependents()


@kernel
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    return x


@kernel
def finish_rows(
    result: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    token: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    residual_step: tl.tensor,
    out_step: tl.tensor,
    ACTIVATION: tl.constexpr,
) -> None:
    """Sums of one token's rows: what is added to them before and after the activation, and where they go."""
    if bias is not None:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
    result = activated(result, ACTIVATION)
    if residual is not None:
        result += tl.load(residual + token * residual_step + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out + token * out_step + row, result.to(out.dtype.element_ty), mask=row < n)


@kernel
def capped(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(x / cap), by the function that cannot overflow."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@kernel
def int8_codes(x: tl.tensor, by: tl.tensor) -> tl.tensor:
    """x * by, rounded half to even. The launch must forbid fused products: this one is rounded before it is a code."""
    whole = (x * by + NEAREST) - NEAREST
    return tl.minimum(tl.maximum(whole, -128.0), 127.0).to(tl.int8)


@kernel
def float8(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """x as a float of 8 bits. The interpreter loses the carry when rounding reaches the next power of two, so there it
    is given numbers that need no rounding."""
    if INTERPRETED:
        DROPPED: tl.constexpr = 20 if tl.float8e4nv == TYPE else 21
        bits = x.to(tl.int32, bitcast=True)
        bits += ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
        x = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@kernel
def dot4(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """c plus the products of the four signed bytes of a and b: one instruction, which the interpreter does not know."""
    if not INTERPRETED:
        c = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        c += ((a << 24) >> 24) * ((b << 24) >> 24)
        c += ((a << 16) >> 24) * ((b << 16) >> 24)
        c += ((a << 8) >> 24) * ((b << 8) >> 24)
        c += (a >> 24) * (b >> 24)
    return c


@kernel
def matrix_product(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """c + a b of floats. The interpreter multiplies the bits of bfloat16, so it gets wider operands."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")
