"""Tokens times ternary weights: which kernel, by the number of tokens and what the processor has."""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.fives import PackedFives, by_fives
from ranvier.codegen.llvm.ternary.fours import PackedFours, by_fours
from ranvier.codegen.llvm.ternary.pack import Packed, PackedTernary
from ranvier.codegen.llvm.ternary.tiles import by_tiles, suits_tiles
from ranvier.codegen.llvm.ternary.triples import PackedTriples, by_triples
from ranvier.codegen.llvm.ternary.unpacked import by_unpacked, suits_unpacked
from ranvier.codegen.llvm.ternary.vectors import by_vectors
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

TILE_ROWS = 4  # tokens from which the matrix unit is faster


def ternary_matmul(
    codes: View,
    packed: Packed,
    out: View,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``out [M, N] = epilogue(codes @ (w + 1))``: the weights' codes are multiplied, so every sum is larger by that of
    its token's codes. ``codes`` are rows as ``token_codes`` writes them."""
    m = out.shape[0]
    assert out.shape[1] == packed.n
    strides = (out.strides[0], out.strides[1])
    if not (m and packed.n):
        return []
    if isinstance(packed, PackedFives):
        return [by_fives(codes, m, packed, out, strides, epilogue, isa, threads)]
    if isinstance(packed, PackedTriples):
        return [by_triples(codes, m, packed, out, strides, epilogue, threads)]
    assert isinstance(packed, PackedTernary | PackedFours)
    if isinstance(packed, PackedTernary) and m >= TILE_ROWS and suits_tiles(isa):
        return [by_tiles(codes, m, packed, out, strides, epilogue, threads)]
    if suits_unpacked(isa, m, packed.k):
        return [by_unpacked(codes, m, packed, out, strides, epilogue, isa, threads)]
    if isinstance(packed, PackedFours):
        return [by_fours(codes, m, packed, out, strides, epilogue, threads)]
    return [by_vectors(codes, m, packed, out, strides, epilogue, isa, threads)]
