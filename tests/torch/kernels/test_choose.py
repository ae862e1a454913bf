"""Every product has a kernel, and tiles are such that kernels can be built with them."""

from __future__ import annotations

import pytest

from ranvier.providers.cuda.kernels.choose import (
    GEMM,
    GEMV,
    LIBRARY,
    UNPACKED,
    WEIGHTS,
    decode_splits,
    gemv_tile,
    product,
)
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile, power_of_two

TOKENS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 65, 4096)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_size_has_a_kernel_with_a_tile_of_its_kind(weights: str, tokens: int) -> None:
    for k in (64, 1000, 2048, 8192):
        choice = product(weights, tokens, k)
        kind = {GEMV: Tile, GEMM: MatrixTile, LIBRARY: type(None), UNPACKED: type(None)}[choice.kernel]
        assert isinstance(choice.tile, kind)
        if isinstance(choice.tile, MatrixTile):
            sizes = (choice.tile.rows, choice.tile.columns, choice.tile.depth)
            assert all(size == power_of_two(size) and size >= 16 for size in sizes)
        tile = gemv_tile(weights, k, tokens)
        assert tile.depth == power_of_two(tile.depth)
        assert tile.rows == power_of_two(tile.rows)


def test_one_token_is_never_the_librarys() -> None:
    assert {product(weights, 1, 2048).kernel for weights in WEIGHTS} == {GEMV}


def test_what_is_unknown_is_said() -> None:
    with pytest.raises(ValueError, match="int4"):
        product("int3", 1, 64)


def test_splits_fill_the_device_and_none_is_empty() -> None:
    assert decode_splits(1, 8, 2048, 132) == 16
    assert decode_splits(1, 8, 128, 132) == 2
    assert decode_splits(64, 8, 2048, 132) == 4
    assert decode_splits(1, 8, 32768, 132) == 64


def test_many_rows_have_tiles_of_their_own() -> None:
    assert gemv_tile("float", 4096, n=128256) != gemv_tile("float", 4096, n=2048)
    assert product("float", 1, 2048) == product("float", 1, 2048, 1)
