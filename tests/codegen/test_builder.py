"""Constants as LLVM writes them."""

from __future__ import annotations

import pytest

from ranvier.codegen.llvm.builder.types import literal


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_integers_may_have_a_sign_or_not(bits: int) -> None:
    middle, most = 1 << (bits - 1), (1 << bits) - 1
    kind = f"i{bits}"
    assert [literal(kind, each) for each in (0, 1, middle - 1, -middle, -1)] == [
        *("0", "1", str(middle - 1), str(-middle), "-1")
    ]
    assert literal(kind, middle) == str(-middle) and literal(kind, most) == "-1"
    assert literal(kind, most + 1) == str(most + 1)  # no such number: LLVM says so
