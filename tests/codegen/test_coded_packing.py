"""Weights packed by generated code: byte for byte what NumPy makes of them, whatever their bits and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.coded import CodedB, Coding, Groups, couples, pack_coded, packer
from ranvier.codegen.llvm.coded.lookup import all_levels, looked_up, lookup_spec, positions
from ranvier.codegen.llvm.coded.numbers import Columns, Numbers, scales_of, subtracted_of
from ranvier.codegen.llvm.coded.packer import WORDS, Packing, pays
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.coded.tables import table_of
from ranvier.codegen.llvm.coded.visited import pack_experts
from ranvier.codegen.llvm.isa import TABLE, Isa, architecture, named
from ranvier.ops.contrib.levels import WHOLE_TABLES
from ranvier.ops.contrib.weight_only import packed, unpacked
from tests.codegen.coupled_oracle import coupled
from tests.codegen.harness import ISAS
from tests.codegen.test_coded import WAYS

Array = np.ndarray[Any, Any]
F32 = np.float32
IQ4 = tuple(WHOLE_TABLES[1].tolist())
FLOAT4 = tuple(WHOLE_TABLES[0].tolist())  # zero is there twice
# bits of stored codes, and the coding that holds them
HELD = {
    "2": (2, Coding(2)),
    "3 in 4": (3, Coding(4)),
    "4": (4, Coding(4)),
    "5 in 6": (5, Coding(6)),
    "5 in 8": (5, Coding(8)),
    "6": (6, Coding(6)),
    "6 in 8": (6, Coding(8)),
    "8": (8, Coding(8)),
    "levels of 2": (2, Coding(2, "levels", (0.5, 0.0, -1.0, 3.0))),
    "levels of 4": (4, Coding(4, "levels", FLOAT4)),
    "levels of 6 in 4": (6, Coding(4, "levels", FLOAT4)),
    "levels of 8 in 4": (8, Coding(4, "levels", IQ4)),
    "float8": (8, Coding(8, "e4m3")),
    "float16": (16, Coding(16, "float16")),
    "float32": (32, Coding(32, "float32")),
}


def _shaped() -> dict[str, Isa]:
    """Vectors and panels as other machines have them, made of what this one has."""
    best, found = ISAS[0], {}
    for size, streams in ((16, 1), (16, 4), (32, 1), (32, 4), (64, 4)):
        name = f"{size} bytes, {streams} streams"
        found[name] = replace(best, name=f"{best.name} {name}", vector_bytes=size, streams=streams)
    return found


EVERY = WAYS | _shaped()


@contextmanager
def generated(always: bool) -> Iterator[None]:
    """Code for all that it can pack, or for nothing."""
    with (
        mock.patch.object(packer, "LEAST_BYTES", 0 if always else 1 << 62),
        mock.patch.object(packer, "runs", lambda isa: isa.triple == architecture()),
    ):
        yield


def bytes_of(b: CodedB) -> list[tuple[object, bytes]]:
    """Everything that kernels read, and how it lies."""

    def numbers(found: Numbers) -> tuple[object, bytes]:
        assert found.storage.array is not None
        return found.layout.key, found.storage.array.tobytes()

    assert b.codes.array is not None
    assert b.codes.array.ctypes.data % 64 == 0
    made: list[tuple[object, bytes]] = [(b.coupled, b.codes.array.tobytes()), numbers(b.scales)]
    return made if b.less is None else [*made, (b.less.middle, b""), numbers(b.less.numbers)]


def stored_codes(rng: np.random.Generator, bits: int, coding: Coding, n: int, k: int, more: int) -> Array:
    """Rows that are full of codes, and some bytes behind them that are nobody's."""
    if coding.kind == "levels" and bits != coding.bits:
        codes = rng.choice(np.array(coding.levels), (n, k)).astype(int) + (1 << (bits - 1))
        rows = packed(codes.astype(np.uint8), bits)
    else:
        rows = rng.integers(0, 256, (n, -(-k * bits // 8))).astype(np.uint8)
    return np.hstack([rows, rng.integers(0, 256, (n, more)).astype(np.uint8)])


def numbers_of(rng: np.random.Generator, kind: str, n: int, groups: int, middle: int) -> Array | None:
    if kind == "none":
        return None
    if kind == "nothing":
        return np.full((n, groups), middle, F32)
    if kind == "integers":
        return rng.integers(0, 2 * middle, (n, groups)).astype(F32)
    made = rng.uniform(-20, 40, (n, groups)).astype(F32)
    return made.astype(np.float16).astype(F32) if kind == "halves" else made


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_as_numpy_packs_them(data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from(list(EVERY.values())))
    bits, coding = HELD[data.draw(st.sampled_from(list(HELD)))]
    n, units = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    k = units * data.draw(st.sampled_from([coding.per_word, 32]))
    group = data.draw(st.sampled_from([16, 32, 64, 128, k, 24]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    couple = data.draw(st.booleans())
    rows = stored_codes(rng, bits, coding, n, k, data.draw(st.sampled_from([0, 0, 4])) if bits <= 8 else 0)
    groups = Groups.even(k, group, coding)
    count = len(groups.order)
    scales = numbers_of(rng, data.draw(st.sampled_from(["halves", "floats"])), n, count, 8)
    assert scales is not None
    below = 1 << (bits - 1) if bits <= 8 else 1
    zeros = numbers_of(rng, data.draw(st.sampled_from(["none", "nothing", "integers", "floats"])), n, count, below)
    floats = rows.view(f"u{bits // 8}") if bits > 8 else rows
    more = {"filled": bits <= 8 and coding.kind != "e4m3", "bits": bits, "below": below}

    def made(always: bool, couple: bool) -> CodedB:
        with generated(always):
            about = (coding, n, groups, scales, None if bits > 8 else zeros, isa)
            return pack_coded(lambda first, last: floats[first:last], *about, **more, coupled=couple)  # type: ignore[arg-type]

    if coding.kind == "e4m3":
        floats = floats[:, :k]
    expected = made(False, couple)
    assert bytes_of(made(True, couple)) == bytes_of(expected)
    if couple and couples(isa):
        assert bytes_of(expected) == bytes_of(coupled(made(False, False), isa))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("isa", EVERY.values(), ids=EVERY)
def test_code_is_made_for_all_that_lie_in_order(isa: Isa, bits: int) -> None:
    """What is compared with NumPy is not NumPy again."""
    coding = Coding({3: 4, 5: 6}.get(bits, bits))
    rows = stored_codes(np.random.default_rng(0), bits, coding, 40, 512, 0)
    groups, scales = Groups.even(512, 32, coding), np.ones((40, 16), F32)
    with generated(True), mock.patch.object(Packing, "pack", autospec=True, side_effect=Packing.pack) as packs:
        pack_coded(lambda first, last: rows[first:last], coding, 40, groups, scales, None, isa, filled=True, bits=bits)
    assert packs.called


@pytest.mark.parametrize("isa", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("held", ["4", "6", "levels of 8 in 4"])
def test_experts_whose_columns_fill_no_panel(isa: Isa, held: str) -> None:
    bits, coding = HELD[held]
    rng, groups = np.random.default_rng(1), Groups.even(256, 32, coding)
    rows = np.stack([stored_codes(rng, bits, coding, 90, 256, 0) for _ in range(3)])[:, 2:39]  # with gaps in between
    scales, zeros = (rng.uniform(1, 2, (3, 37, 8)).astype(F32) for _ in range(2))

    def made(always: bool) -> CodedB:
        with generated(always):
            about = (coding, groups, scales, zeros, isa)
            return pack_experts(rows, *about, filled=True, bits=bits, below=8).all

    assert bytes_of(made(True)) == bytes_of(made(False))


def test_columns_past_the_last_of_an_expert_subtract_nothing() -> None:
    isa, coding = ISAS[0], Coding(4)
    rows, scales = np.zeros((2, 5, 32), np.uint8), np.ones((2, 5, 2), F32)
    about = {"filled": True, "below": 8}
    groups = Groups.even(64, 32, coding)
    assert pack_experts(rows, coding, groups, scales, np.full_like(scales, 8), isa, **about).all.less is None  # type: ignore[arg-type]
    packed = pack_experts(rows, coding, groups, scales, np.full_like(scales, 9.5), isa, **about).all  # type: ignore[arg-type]
    less = packed.less
    assert less is not None
    assert less.numbers.storage.array is not None
    columns = less.numbers.storage.array.swapaxes(1, 2).reshape(2, -1, 2)
    times = np.where(packed.coupled & (np.arange(5) >= packed.lanes), 16, 1)[:, None]  # of the second of two vectors
    expected = np.broadcast_to(np.float32(1.5 + (less.middle or 0)) * times, (2, 5, 2))  # or an offset, of scales of 1
    np.testing.assert_array_equal(columns[:, :5], expected)
    assert not columns[:, 5:].any()


@pytest.mark.parametrize("isa", EVERY.values(), ids=EVERY)
def test_rows_of_a_wider_matrix_and_many_threads(isa: Isa) -> None:
    """Rows need not follow each other at once, and parts are packed side by side."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (3000, 1100)).astype(np.uint8)[:, 50:1074]
    scales = rng.uniform(1, 2, (3000, 64)).astype(F32)

    def made(always: bool) -> CodedB:
        with generated(always):
            groups = Groups.even(2048, 32, Coding(4))
            about = (Coding(4), 3000, groups, scales, scales, isa)
            return pack_coded(lambda a, b: rows[a:b], *about, filled=True, below=8)

    assert bytes_of(made(True)) == bytes_of(made(False))


@pytest.mark.parametrize("bits", [5, 6, 8])
@pytest.mark.parametrize("table", WHOLE_TABLES, ids=["float4", "iq4", "iq2", "iq3"])
@pytest.mark.parametrize("isa", WAYS.values(), ids=WAYS)
def test_levels_are_looked_up(isa: Isa, table: Array, bits: int) -> None:
    levels = tuple(table.tolist())
    inside = [level for level in levels if abs(level) < 1 << (bits - 1)]
    codes = np.random.default_rng(3).choice(inside, (5, 64)).astype(int) + (1 << (bits - 1))
    for other in (None, (0, 0), (4, 63), (2, 9)):
        if other is not None:
            codes[other] = 0  # the least there is, which no table has
        stored = packed(codes.astype(np.uint8), bits)
        found = looked_up(stored, levels, bits, isa)
        np.testing.assert_array_equal(unpacked(found, 4), positions(levels, bits)[codes])
        assert all_levels(stored, levels, bits, isa) == (other is None)


@pytest.mark.parametrize("isa", WAYS.values(), ids=WAYS)
def test_a_table_is_found_by_code_as_by_numpy(isa: Isa) -> None:
    rng = np.random.default_rng(4)
    for k, more in ((64, 0), (60, 0), (64, 3)):
        rows = stored_codes(rng, 8, Coding(4, "levels", IQ4), 300, k, more)
        for last in (rows[-1, k - 1], 0):
            rows[-1, k - 1] = last
            found = []
            for always in (True, False):
                with generated(always):
                    found.append(table_of(rows, 8, k, isa))
            assert found == ([None] if last == 0 else [IQ4]) * 2


@pytest.mark.parametrize("isa", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("group", [0, 32, 128])
def test_numbers_at_the_edges_of_their_types(isa: Isa, group: int) -> None:
    """Signs of zeros, numbers that are too large once they are times the factor, and tiny ones."""
    edges = np.array([0.0, -0.0, 3e38, -3e38, 65504, 65503, 1e-45, -1e-40, 1.5, 2**-24, 8, 8 + 2**-20, np.inf], F32)
    numbers = np.random.default_rng(5).choice(edges, (45, 40))
    columns = Columns(isa.lanes(4) * beside(isa), isa.lanes(4), group if couples(isa) else 0, isa)
    made = []
    for always in (True, False):
        with generated(always):
            less = subtracted_of(numbers, numbers, 0, columns, None, 8)
            assert less is not None
            made.append([x.storage.array.tobytes() for x in (scales_of(numbers, 0, columns), less.numbers)])  # type: ignore[union-attr]
    assert made[0] == made[1]


def test_code_is_made_for_much_and_for_this_machine_only() -> None:
    isa = next(iter(WAYS.values()))
    assert pays(packer.LEAST_BYTES, isa)
    assert not pays(packer.LEAST_BYTES - 1, isa)
    for other in TABLE:  # names are not enough: every architecture has one that is portable
        assert other.triple == architecture() or not pays(packer.LEAST_BYTES, other)
    rows = np.zeros((64, 64), np.uint8)
    before = library.counts.compiled, library.counts.read
    pack_coded(
        *(lambda first, last: rows[first:last], Coding(4), 64, Groups.even(128, 32, Coding(4)), np.ones((64, 4), F32)),
        *(None, isa),
        filled=True,
    )
    assert (library.counts.compiled, library.counts.read) == before


SETS = [(each.name, each.triple) for each in TABLE]


@pytest.mark.parametrize(("name", "triple"), SETS, ids=[" ".join(each) for each in SETS])
def test_every_instruction_set_has_its_code(name: str, triple: str) -> None:
    isa = named(name, triple)
    packings = [Packing(bits, coding) for bits, coding in HELD.values() if bits == coding.bits or not coding.levels]
    packings += [Packing(32, WORDS, numbers=True)]
    packings += [Packing(4, Coding(4), coupled=True)] if beside(isa) % 2 == 0 else []
    specs = [packing.spec() for packing in dict.fromkeys(packings)]
    for spec in (*specs, lookup_spec("others", 6), lookup_spec("positions", 8)):
        assert compiler.compile_object(library.source(spec, isa), isa)
