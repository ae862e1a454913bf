"""3x3 convolutions of floats by Winograd's F(2x2), F(4x4) and F(6x6): fewer multiplications than outputs times taps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.conv.epilogues import Lanes, Tail
from ranvier.codegen.llvm.conv.plan import micro_codes, panel_vectors
from ranvier.codegen.llvm.conv.shape import ConvShape, Packed, packed_constant
from ranvier.codegen.llvm.conv.squares import Kind, Numbers, Squares, position_panels, squares_launch
from ranvier.codegen.llvm.conv.transforms import both_ways, filter_transform, input_transform, output_transform
from ranvier.codegen.llvm.gemm.tiles import tile_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_ALONE = 768  # columns of a product with the filter transform


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, dtype: DType, m: int) -> Packed:
    """[panel][position][channel][column]."""
    item = dtype.numpy.itemsize
    vectors = panel_vectors(shape, isa, item)
    cut = position_panels(shape, vectors, isa, item)
    # [in, tap, out] by one plain transposition, then whole rows move: large models are packed at load
    moved = np.ascontiguousarray(w.reshape(shape.cout, shape.cin * 9).T).reshape(shape.cin, 9, shape.cout)
    taps = np.zeros((9, shape.cin, ((cut.count - 1) * vectors + cut.rest) * cut.lanes), dtype.numpy)
    taps[:, :, : shape.cout] = moved.transpose(1, 0, 2)
    matrix = filter_transform(m, dtype.numpy)
    packed = packed_empty(((m + 2) ** 2 * cut.group_elements(),), dtype.numpy)
    at = 0
    for k in range(cut.count):
        piece = np.ascontiguousarray(taps[:, :, k * cut.columns : (k + 1) * cut.columns]).reshape(9, -1)
        size = len(matrix) * piece.shape[1]
        target = packed[at : at + size].reshape(len(matrix), -1)
        for c in range(0, piece.shape[1], _ALONE):  # so few at a time that BLAS wakes no threads
            np.matmul(matrix, piece[:, c : c + _ALONE], out=target[:, c : c + _ALONE])
        at += size
    return packed_constant(f"winograd{m}", packed, dtype, vectors)


def winograd(
    x: View, packed: Packed, out: View, shape: ConvShape, isa: Isa, epilogue: Epilogue | None, threads: int
) -> list[Launch]:
    m, numbers = int(packed.kind.removeprefix("winograd")), Numbers(x.dtype, x.dtype, x.dtype)
    cut = position_panels(shape, packed.block, isa, x.dtype.numpy.itemsize)

    def spec(tail: Tail) -> KernelSpec:
        return KernelSpec(
            f"winograd {m}x{m} {x.dtype}",
            ("winograd", 2, m, x.dtype.name, out.dtype.name, tail.key),
            lambda module, symbol, target: _Winograd(module, symbol, target, m, numbers, out.dtype, tail).function(),
        )

    def codes(used: set[int]) -> Sequence[Code]:
        return micro_codes(x.dtype, used, cut, "rows")

    kind = Kind(m, numbers, spec, codes, tile_of(isa, packed.block).rows, "conv winograd")
    return [squares_launch(kind, x, packed.storage, cut, out, shape, isa, epilogue, threads)]


class _Winograd(Squares):
    def nothing(self) -> Val:
        return self.f.const(self.image, 0.0)

    def loaded(self, address: Val, piece: Lanes) -> Val:
        kind = vector(self.inner, piece.count)
        return self.f.load(kind, address) if piece.mask is None else self.f.masked_load(kind, address, piece.mask)

    def transformed(self, lines: list[list[Val]]) -> list[list[Val]]:
        return both_ways(self.f, self.m, lines, input_transform)

    def returned(self, lines: list[list[Val]]) -> list[list[Val]]:
        return both_ways(self.f, self.m, lines, output_transform)
