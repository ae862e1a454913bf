"""Products of 8-bit tokens and weights of -1, 0 and 1, held in 2 bits; sums are exact int32."""

from ranvier.codegen.llvm.ternary.pack import PackedTernary, pack_ternary
from ranvier.codegen.llvm.ternary.product import ternary_matmul
from ranvier.codegen.llvm.ternary.tokens import row_bytes, token_codes

__all__ = ["PackedTernary", "pack_ternary", "row_bytes", "ternary_matmul", "token_codes"]
