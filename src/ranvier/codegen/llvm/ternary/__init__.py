"""Products of 8-bit tokens and weights of -1, 0 and 1, held in 2 bits or five to a byte; sums are exact int32."""

from ranvier.codegen.llvm.ternary.fives import PackedFives, pack_fives, suits_fives
from ranvier.codegen.llvm.ternary.pack import PackedTernary, pack_ternary
from ranvier.codegen.llvm.ternary.product import ternary_matmul
from ranvier.codegen.llvm.ternary.tokens import row_bytes, token_codes

__all__ = [
    "PackedFives",
    "PackedTernary",
    "pack_fives",
    "pack_ternary",
    "row_bytes",
    "suits_fives",
    "ternary_matmul",
    "token_codes",
]
