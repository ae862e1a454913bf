"""Codes of two columns in a byte, made of packed ones as ``coupled.py`` defines them: what packing has to give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.llvm.coded import CodedB, couples
from ranvier.codegen.llvm.coded.numbers import Layout, Numbers
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]


def coupled(b: CodedB, isa: Isa) -> CodedB:
    """The same weights in that form, if they have one."""
    if not couples(isa) or b.coding.kind != "integers" or b.coding.bits != 4 or b.words * 8 > 1 << 16:
        return b
    assert b.codes.array is not None
    pairs = b.codes.array[:-1].view(np.uint32).reshape(-1, 2, b.lanes)
    codes = [[pairs[:, v] >> shift & 0x0F0F0F0F for v in range(2)] for shift in (0, 4)]
    made = np.stack([a | (other ^ 0x08080808) << 4 for a, other in codes], axis=1).astype(np.uint32)
    less = None if b.less is None else replace(b.less, numbers=_enlarged(b, b.less.numbers, 1))
    words = np.append(made.reshape(-1).view(np.int32), np.int32(0))
    return replace(b, codes=Storage.packed(words), scales=_enlarged(b, b.scales, 0), less=less, coupled=True)


def _enlarged(b: CodedB, numbers: Numbers, which: int) -> Numbers:
    """Those of the first or second of two vectors times 16; in float32 where their type has no such number, or groups
    are short."""
    dtype = numbers.layout.dtype
    if dtype is DType.float16 and b.words * b.coding.per_word < 64:
        dtype = DType.float32
    assert numbers.storage.array is not None
    wide = numbers.storage.array.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wide.reshape(-1, 2, b.lanes)[:, which] *= 16
        narrow = wide.astype(dtype.numpy)
    fits = np.array_equal(narrow.astype(np.float32), wide)
    return Numbers(Storage.packed(narrow if fits else wide), Layout(dtype if fits else DType.float32))
