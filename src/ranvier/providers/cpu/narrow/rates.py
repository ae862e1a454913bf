"""How long work takes: what the choice between 32 and 16 bits is made with.

Only ratios matter for it, and they differ little between machines that have the instructions, so these are numbers
measured on one of them by ``bench/bench_narrow.py``, not at every load.
"""

from __future__ import annotations

from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_FLOAT = 155e9  # operations a second of one core in float32 products
# How many times as fast products of 16 bits are where many of them make one sum.
_PRODUCTS = {
    DType.bfloat16: (("amx-bf16", 5.0), ("avx512bf16", 1.6), ("bf16", 1.6)),
    DType.float16: (("amx-fp16", 5.0), ("fullfp16", 1.7)),
}
# Rounding and storing a sum of 16-bit products takes as long as so many of them, …
_FINISHING = {DType.bfloat16: 32.0, DType.float16: 8.0}
_COPYING = 18.0  # … for every line of a pixel that is no whole one, and is copied before, as long as so many more …
_STARTING = 5.0  # … and of float32 products all of that as long as so many of those
_TRANSFORMED = 2.2  # how many times as fast float32 products are where Winograd's algorithm saves multiplications
# One channel at a time, in float32 and in 16 bits: alone in its cache bfloat16 is a fifth slower, in models it is not,
# where there are whole lines of channels; others take so many times as long.
_DEPTHWISE = {DType.bfloat16: (0.45, 0.45), DType.float16: (0.45, 0.9)}
_LEFT_OVER = 1.5
_LINE = 32  # 16-bit numbers of a line
_NEAR, _FAR = 45e9, 20e9  # bytes a second of one core, of tensors that fit into its cache and of others
CACHE = 1 << 20
LAUNCH = 1e-6  # seconds of a kernel that does nothing

# How fast a product is of float32 and of 16-bit operands, in parts of what large float32 products reach.
Pace = tuple[float, float]


def product_pace(isa: Isa, narrow: DType, depth: float) -> Pace:
    """Of sums of ``depth`` products."""
    return 1.0, _times(isa, narrow) / (1.0 + _FINISHING[narrow] / depth)


def window_pace(isa: Isa, narrow: DType, taps: int, channels: int, width: int, *, transformed: bool = False) -> Pace:
    """Of windows of so many pixels and channels, for ``width`` others; ``transformed``: Winograd's algorithm saves
    multiplications in float32."""
    depth = taps * channels
    wide, fast = product_pace(isa, narrow, depth)
    if narrow is DType.bfloat16:
        lines = -(-channels // _LINE) if channels % _LINE else 0
        lanes = -(-width // isa.lanes(4)) * isa.lanes(4)
        wide = width / lanes / (1.0 + _STARTING / depth)
        fast = wide * _times(isa, narrow) / (1.0 + (_FINISHING[narrow] + _COPYING * lines) / depth)
    return _TRANSFORMED if transformed else wide, fast


def _times(isa: Isa, narrow: DType) -> float:
    return next((times for name, times in _PRODUCTS[narrow] if isa.has(name)), 1.0)


def depthwise_pace(narrow: DType, channels: int) -> Pace:
    wide, fast = _DEPTHWISE[narrow]
    if narrow is DType.bfloat16:
        rest = channels % _LINE
        fast *= channels / (channels - rest + _LEFT_OVER * rest)
    return wide, fast


def multiplying(flops: float, isa: Isa) -> float:
    """Seconds of float32 multiplications and additions."""
    return flops / (_FLOAT * isa.pace)


def touching(nbytes: float) -> float:
    """Seconds to read or write a tensor."""
    return nbytes / (_NEAR if nbytes <= CACHE else _FAR)
