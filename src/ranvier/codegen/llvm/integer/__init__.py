"""Products and convolutions of codes of 8 and 16 bits with int32 sums, exact unless squares of outputs are made."""

from ranvier.codegen.llvm.integer.convolution import (
    dot_of_filters,
    finishes_together,
    integer_conv,
    pack_filters,
    pixels_hint,
    takes_triples,
)
from ranvier.codegen.llvm.integer.depthwise import integer_depthwise, is_unrolled, lengthwise, pack_depthwise
from ranvier.codegen.llvm.integer.dots import dot_of, tuned_dot
from ranvier.codegen.llvm.integer.lstm import Recurrent, quantized_lstm
from ranvier.codegen.llvm.integer.matmul import integer_matmul
from ranvier.codegen.llvm.integer.pack import PackedCodes, moved_right, pack_at_run, pack_codes, pack_words
from ranvier.codegen.llvm.integer.padded import begins_lines, reads_padded
from ranvier.codegen.llvm.integer.squares import PackedSquares, pack_squares, squares_conv, suits_squares
from ranvier.codegen.llvm.integer.sums import column_sums
from ranvier.codegen.llvm.integer.table import table_lookup
from ranvier.codegen.llvm.integer.words import (
    multiplies_words,
    pack_word_filters,
    suits_words,
    sums_fit,
    word_conv,
    word_matmul,
)

__all__ = [
    "PackedCodes",
    "PackedSquares",
    "Recurrent",
    "begins_lines",
    "column_sums",
    "dot_of",
    "dot_of_filters",
    "finishes_together",
    "integer_conv",
    "integer_depthwise",
    "integer_matmul",
    "is_unrolled",
    "lengthwise",
    "moved_right",
    "multiplies_words",
    "pack_at_run",
    "pack_codes",
    "pack_depthwise",
    "pack_filters",
    "pack_squares",
    "pack_word_filters",
    "pack_words",
    "pixels_hint",
    "quantized_lstm",
    "reads_padded",
    "squares_conv",
    "suits_squares",
    "suits_words",
    "sums_fit",
    "table_lookup",
    "takes_triples",
    "tuned_dot",
    "word_conv",
    "word_matmul",
]
