"""How long work takes: what the choice between 32 and 16 bits is made with.

Only ratios matter for it, and they differ little between machines that have the instructions, so these are numbers
measured once on one of them (bench/NOTES.md), not at every load.
"""

from __future__ import annotations

from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType

_FLOAT = 90e9  # operations a second of one core in float32 products, as they are reached in models
# How many times as fast products of 16 bits are where operands come from the cache.
_PRODUCTS = {
    DType.bfloat16: (("amx-bf16", 6.0), ("avx512bf16", 1.6), ("bf16", 1.6)),
    DType.float16: (("amx-fp16", 6.0),),
}
_NEAR, _FAR = 40e9, 10e9  # bytes a second of one core, of tensors that fit into its cache and of others
CACHE = 1 << 20
LAUNCH = 1e-6  # seconds of a kernel that does nothing


def product_speed(isa: Isa, narrow: DType) -> float:
    """How many times as fast a product of 16-bit operands is as one of float32, apart from what its bytes take."""
    return next((times for name, times in _PRODUCTS[narrow] if isa.has(name)), 1.0)


def multiplying(flops: float) -> float:
    """Seconds of float32 multiplications and additions."""
    return flops / _FLOAT


def touching(nbytes: float) -> float:
    """Seconds to read or write a tensor."""
    return nbytes / (_NEAR if nbytes <= CACHE else _FAR)
