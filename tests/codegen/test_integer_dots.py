"""Byte products of the vector units: what is emitted for them, laws of their results, rows read where they lie."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import isa as isas
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.driver import PassDriver
from ranvier.codegen.llvm.coded.numbers import Layout, Scaling
from ranvier.codegen.llvm.coded.passes import Pass
from ranvier.codegen.llvm.coded.unpacked import Unpacked
from ranvier.codegen.llvm.compiler import assembly
from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.gemm.tiles import tiles
from ranvier.codegen.llvm.integer import integer_conv, integer_matmul, pack_codes, pack_filters
from ranvier.codegen.llvm.integer.dots import BYTES, SIGNED, WORDS, dot_of, multiplies_bytes, shapes_of
from ranvier.codegen.llvm.integer.micro import IntegerMicro
from ranvier.codegen.llvm.integer.strip import Strip
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.library import source
from ranvier.codegen.llvm.ternary.fours import ROWS
from ranvier.codegen.llvm.ternary.fours import _spec as ternary_spec
from ranvier.codegen.llvm.ternary.panels import Block
from ranvier.codegen.llvm.ternary.unpacked import _Fours
from ranvier.codegen.llvm.ternary.unpacked import _spec as unpacked_spec
from ranvier.codegen.loops.ir import Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import Runner, view_of
from tests.codegen.test_integer import PATHS, codes, convolved, last, oracle, path_name, product, saturated

Array = np.ndarray[Any, Any]
NEON = isas.with_extensions(isas.named("neon", "aarch64"), frozenset({"dotprod"}))
PLAIN = isas.named("neon", "aarch64")
COLUMNS = [1, 4, 15, 16, 17, 63, 64, 65, 67, 129]  # around vectors, panels and what is finished together
BYTE_TYPES = st.sampled_from([np.uint8, np.int8])


@functools.cache
def text_of(spec: KernelSpec, isa: Isa) -> str:
    return assembly(source(spec, isa), isa)


def loops(text: str) -> list[str]:
    """Code between a label and a jump back to it."""
    return [m[2] for m in re.finditer(r"(\.LBB\d+_\d+):((?:(?!\.LBB\d+_\d+:)[\s\S])*?)\sb\.\w+\s+\1\b", text)]


def test_which_dot() -> None:
    assert dot_of(NEON) is SIGNED
    assert dot_of(PLAIN) is WORDS
    assert multiplies_bytes(NEON)
    assert not multiplies_bytes(PLAIN)
    assert dot_of(isas.with_extensions(isas.named("avx512", "x86_64"), frozenset({"avx512vnni"}))) is BYTES
    # what is moved for one sign comes as it is for the other, and words and tiles take both
    assert SIGNED.turns(DType.uint8)
    assert not SIGNED.turns(DType.int8)
    assert BYTES.turns(DType.int8)
    assert not BYTES.turns(DType.uint8)
    assert not WORDS.turns(DType.int8)
    assert SIGNED.moves == -BYTES.moves == -128


@pytest.mark.parametrize("made", [IntegerMicro, Strip])
@pytest.mark.parametrize("tile", tiles(shapes_of(NEON)), ids=lambda t: f"{t.rows}x{t.vectors}")
def test_products_pick_lanes(tile: Any, made: type[IntegerMicro] | type[Strip]) -> None:
    """The largest kernels of every width: as many dot products as sums times groups, all by lane, and no sum leaves its
    register inside the loop."""
    kernel = made(tile.rows, tile.vectors)
    longest = max(loops(text_of(kernel.spec(), NEON)), key=len)
    dots = re.findall(r"sdot\s+v\d+\.4s, v\d+\.16b, v\d+\.4b\[\d\]", longest)
    assert len(dots) == 4 * tile.rows * tile.vectors
    assert "[sp" not in longest
    assert "dup" not in longest
    assert "ld1r" not in longest


def test_words_are_long_products() -> None:
    """Without dot products: pairs by two long multiplications and one addition of neighbours."""
    text = text_of(IntegerMicro(4, 2).spec(), PLAIN)
    assert "sdot" not in text
    assert "smull" in text
    assert "addp" in text


AVX2 = isas.named("avx2", "x86_64")
SIXTEEN = {"avx2": AVX2, "avxvnni": isas.with_extensions(AVX2, frozenset({"avxvnni"}))}  # vector registers


@pytest.mark.parametrize("isa", SIXTEEN.values(), ids=SIXTEEN)
def test_no_sum_leaves_one_of_sixteen_registers(isa: Isa) -> None:
    """All kernels there are: nothing of vectors is put aside, however few sums there are and however many could be."""
    for tile in tiles(shapes_of(isa)):
        for rows in range(1, tile.rows + 1):
            text = text_of(IntegerMicro(rows, tile.vectors).spec(), isa)
            aside = [line for line in text.splitlines() if "ymm" in line and "(%rsp" in line]
            assert not aside, (rows, tile.vectors)


@pytest.mark.parametrize("rows", [1, 3])
def test_widened_codes_are_bytes_in_memory(rows: int) -> None:
    """Without VNNI a vector of B is widened once for all rows, from half as many bytes."""
    text = text_of(IntegerMicro(rows, 3).spec(), AVX2)
    longest = max(
        re.findall(r"(\.LBB\d+_\d+):((?:(?!\.LBB\d+_\d+:)[\s\S])*?)\sj\w+\s+\1\b", text), key=lambda m: len(m[1])
    )[1]
    products, widened = (len(re.findall(name, longest)) for name in ("vpmaddwd", "vpmovsxbw"))
    assert products
    assert products == rows * widened


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
def test_four_ternary_columns_take_three_masks(rows: int) -> None:
    """Sixteen lines: three masks and, for each row, four dot products; no constants made anew, little put aside."""
    longest = max(loops(text_of(ternary_spec(Block(rows, 1)), NEON)), key=len)
    assert len(re.findall(r"\bsdot\b", longest)) == 64 * rows
    assert len(re.findall(r"\band\s+v", longest)) == 48
    assert not re.search(r"\b(?:ushr|sshr|movi|dup)\s+v", longest)
    assert len(re.findall(r"\bst[rp]\b|\bmov\s+v", longest)) <= (0 if rows < ROWS else 12)


def test_many_tokens_meet_ternary_bytes() -> None:
    """Four times four k of eight tokens and eight columns: loads and products, and nothing that is put aside."""
    longest = max(loops(text_of(unpacked_spec(Block(8, 1), _Fours), NEON)), key=len)
    assert len(re.findall(r"\bsdot\b", longest)) == 64
    assert not re.search(r"\b(?:and|ushr|mov|movi|dup)\s+v|\bst[rp]\b", longest)


def test_codes_of_four_bits_take_one_instruction_each() -> None:
    """A group of four words in one turn; sums become floats by a subtraction."""
    spec = Pass(Coding(4), Scaling(Layout(DType.float32)), "codes", 1, 4, together=4, once=True, as_floats=True).spec(
        PassDriver
    )
    text = text_of(spec, NEON)
    longest = max(loops(text), key=len)
    count = len(re.findall(r"\bsdot\b", longest))
    assert count == 32
    assert len(re.findall(r"\b(?:and|ushr)\s+v", longest)) == count
    assert "scvtf" not in longest


def test_many_rows_meet_bytes() -> None:
    """A group of 32 for four rows and eight columns: products alone until it ends, and nothing that is put aside."""
    given = Pass(
        Coding(4), Scaling(Layout(DType.float32)), "codes", 4, 2, together=8, once=True, as_floats=True, coupled=True
    )
    longest = max(loops(text_of(given.spec(Unpacked), NEON)), key=len)
    assert len(re.findall(r"\bsdot\b", longest)) == 64
    assert len(re.findall(r"\b(?:fadd|fmul|fmla)\b", longest)) == 24
    assert not re.search(r"\b(?:and|ushr|sshr|scvtf|movi|dup)\s+v|\bst[rp]\b", longest)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@settings(max_examples=15, deadline=None)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 70),
    n=st.sampled_from(COLUMNS),
    left=BYTE_TYPES,
    right=BYTE_TYPES,
    seed=st.integers(0, 1000),
)
def test_any_size(isa: Isa, m: int, k: int, n: int, left: type, right: type, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def extreme(kind: type, *shape: int) -> Array:
        ends = np.iinfo(kind)
        return rng.choice([ends.min, ends.min + 1, -1 if ends.min else 128, 0, ends.max], shape).astype(kind)

    a, b = extreme(left, m, k), extreme(right, k, n)
    np.testing.assert_array_equal(product(a, b, isa, packed=True), oracle(a, b))


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@settings(max_examples=8, deadline=None)
@given(m=st.integers(1, 30), k=st.integers(1, 60), n=st.sampled_from(COLUMNS), seed=st.integers(0, 1000))
def test_moved_codes_differ_by_column_sums(isa: Isa, m: int, k: int, n: int, seed: int) -> None:
    """Unsigned codes are the signed ones and 128: products differ by 128 times the sum of every column."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (k, n)).astype(np.int8)
    moved = (a.astype(np.int16) + 128).astype(np.uint8)
    difference = product(moved, b, isa, packed=True).astype(np.int64) - product(a, b, isa, packed=True)
    np.testing.assert_array_equal(difference, np.broadcast_to(128 * b.astype(np.int64).sum(axis=0), (m, n)))


def requantized(total: Array, scale: Array, kind: type, point: int) -> Array:
    ends = np.iinfo(kind)
    clipped: Array = np.clip(np.rint(total.astype(np.float32) * scale) + point, ends.min, ends.max)
    return clipped.astype(kind)


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("bias", ["constant", "given"])
def test_requantized_products(isa: Isa, left: type, bias: str) -> None:
    """Many rows, all of whose sums are finished together where that pays; a bias of constants, which what moving codes
    adds is joined with, and one that is not known before."""
    for shape, k, n in (((16,), 24, 67), ((3, 11), 64, 16), ((130,), 7, 33), ((2, 5, 4), 20, 129), ((1000,), 32, 48)):
        rng = np.random.default_rng(k)
        a, b = codes(left, *shape, k), codes(np.int8, k, n)
        scale = rng.uniform(1e-4, 1e-2, n).astype(np.float32)
        add, point = rng.integers(-500, 500, n).astype(np.int32), codes(left, 1)
        out = np.zeros((*shape, n), left)
        av, sv, zv, ov = view_of(a), view_of(scale), view_of(point), view_of(out, "output")
        bv = View.constant(add, DType.int32) if bias == "constant" else view_of(add)
        total: Expr = Op("add", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32)
        number = Op("mul", (Op("cast", (total,), DType.float32), Load(1, DType.float32)), DType.float32)
        zero = Op("cast", (Load(2, zv.dtype),), DType.float32)
        operands = (Operand(bv, (0, 0, 1)), Operand(sv, (0, 0, 1)), Operand(zv, (0, 0, 0)))
        epilogue = Epilogue(saturated(number, zero, left), operands)
        rows = a.reshape(-1, k).shape[0]
        for threads in (1, 2):
            packed = pack_codes(b, isa, rows_hint=rows)
            launches = integer_matmul(av, packed, ov, isa, epilogue=epilogue, threads=threads)
            bound = {av.storage: a, sv.storage: scale, zv.storage: point, ov.storage: out}
            bound |= {bv.storage: add} if bias == "given" else {}
            Runner(launches, isa, bound, split=threads)()
            np.testing.assert_array_equal(out, requantized(oracle(a, b) + add, scale, left, int(point[0])))
            out[...] = 77


def at_the_end_of_memory(array: Array) -> tuple[Array, mmap.mmap]:
    """A copy behind which lies a page that nobody may touch."""
    size = mmap.PAGESIZE
    pages = -(-array.nbytes // size) * size
    memory = mmap.mmap(-1, pages + size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + pages, size, 0) == 0
    found = np.frombuffer(memory, np.uint8, array.nbytes, pages - array.nbytes).view(array.dtype).reshape(array.shape)
    found[...] = array
    return found, memory


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
def test_single_pixels(isa: Isa, left: type) -> None:
    """Windows of one pixel side by side in memory, whose last block of rows ends with the image: nothing behind it is
    read, which would end the process."""
    for channels, pixels, filters in ((4, 5, 3), (8, 7, 16), (16, 61, 67), (64, 49, 129), (32, 700, 20), (12, 1, 5)):
        x = last(codes(left, 1, channels, 1, pixels))
        flat, memory = at_the_end_of_memory(np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
        image = flat.transpose(0, 3, 1, 2)
        w, zero = codes(np.int8, filters, channels, 1, 1), codes(left, 1)
        shape = ConvShape.conv(image.shape, w.shape)
        out = last(np.full((1, filters, 1, pixels), -7, np.int32))
        views = [view_of(image), view_of(zero), view_of(out, "output")]
        launches = integer_conv(views[0], views[1], pack_filters(w, isa, shape), views[2], shape, isa)
        Runner(launches, isa, dict(zip([v.storage for v in views], (image, zero, out))))()
        want = w.reshape(filters, channels).astype(np.int64) @ x.reshape(channels, pixels).astype(np.int64)
        np.testing.assert_array_equal(out.reshape(filters, pixels), want)
        del flat, image, memory


# image, filters, strides, dilations, pads
WINDOWS: list[tuple[Any, ...]] = [
    ((16, 6, 7), (24, 16, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    ((5, 4, 9), (8, 5, 2, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((80, 5, 4), (17, 80, 3, 2), (1, 2), (1, 1), (0, 1, 0, 0)),
    ((9, 7, 8), (33, 9, 3, 3), (2, 2), (2, 2), (2, 0, 0, 1)),
    ((3, 9, 10), (20, 3, 7, 7), (2, 2), (1, 1), (3, 3, 3, 3)),
    ((3, 5, 6), (12, 3, 3, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((3, 4, 21), (16, 3, 2, 9), (1, 3), (2, 1), (1, 4, 0, 2)),
]


@pytest.mark.parametrize("isa", PATHS, ids=path_name)
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("room", [0, 1], ids=["side by side", "a byte apart"])
def test_windows_at_the_end_of_memory(isa: Isa, left: type, room: int) -> None:
    """Windows are copied by whole vectors, but nothing behind the image is read, which would end the process. Pixels of
    three channels may have a fourth byte, which is left out."""
    for size, filters, strides, dilations, pads in WINDOWS:
        channels, *rest = size
        w, zero = codes(np.int8, *filters), codes(left, 1)
        shape = ConvShape.conv((1, *size), w.shape, strides=strides, dilations=dilations, pads=pads)
        for start in range(room + 1):  # the byte that is left out comes last or first
            flat, memory = at_the_end_of_memory(codes(left, 1, *rest, channels + room))
            pixels = flat.transpose(0, 3, 1, 2)
            out = last(np.full((1, shape.cout, *shape.out[1:]), -7, np.int32))
            views = [view_of(pixels), view_of(zero), view_of(out, "output")]
            image = View(views[0].storage, views[0].dtype, (1, *size), views[0].strides, start)
            launches = integer_conv(image, views[1], pack_filters(w, isa, shape), views[2], shape, isa)
            Runner(launches, isa, dict(zip([v.storage for v in views], (pixels, zero, out))))()
            seen = pixels[:, start : start + channels].astype(np.int64)
            np.testing.assert_array_equal(out, convolved(seen, int(zero[0]), w.astype(np.int64), shape, pads[2:]))
            del flat, pixels, memory
