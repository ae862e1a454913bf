"""Products of 8-bit tokens and weights of -1, 0 and 1, held in 2 bits, five to a byte or nine to two bytes; sums are
exact int32."""

from ranvier.codegen.llvm.ternary.forms import Form, form_of
from ranvier.codegen.llvm.ternary.pack import Packed
from ranvier.codegen.llvm.ternary.product import ternary_matmul
from ranvier.codegen.llvm.ternary.tokens import row_bytes, token_codes

__all__ = ["Form", "Packed", "form_of", "row_bytes", "ternary_matmul", "token_codes"]
