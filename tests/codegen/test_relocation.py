"""What is written into code so that it reaches a place, and what cannot be written."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.codegen.llvm.relocation import RULES

X86, ARM = RULES["x86_64"], RULES["aarch64"]
ADRP, LOW_ADD, LOW_LOAD_16, CALL, ADR = 275, 277, 299, 283, 274
_BL, _ADRP, _ADR, _ADD, _LDR_Q = 0x94000000, 0x90000008, 0x10000008, 0x91000108, 0x3DC00100


def written(rules, kind: int, at: int, target: int, word: int = 0) -> int | None:
    """The 4 bytes at a place afterwards; None where they cannot be written, and then nothing may have been."""
    code = bytearray(at + 8)
    struct.pack_into("<I", code, at, word)
    before = bytes(code)
    if not rules.write(code, at, kind, target):
        assert code == before
        return None
    assert code[:at] == before[:at] and code[at + 4 :] == before[at + 4 :]
    return int(struct.unpack_from("<I", code, at)[0])


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def address_bits(word: int) -> int:
    """What adr and adrp hold."""
    return signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)


places = st.integers(0, 5000).map(lambda n: 4 * n)


@given(at=places, target=places)
def test_a_call_holds_its_distance_in_instructions(at, target):
    word = written(ARM, CALL, at, target, _BL)
    assert word is not None and word >> 26 == _BL >> 26
    assert at + 4 * signed(word & 0x3FFFFFF, 26) == target


@given(at=places, target=st.integers(0, 20000), register=st.integers(0, 30))
def test_an_address_is_its_page_and_the_rest(at, target, register):
    page, rest = written(ARM, ADRP, at, target, _ADRP | register), written(ARM, LOW_ADD, at, target, _ADD | register)
    assert page is not None and rest is not None
    assert page & 0x9F00001F == _ADRP | register and rest & ~(0xFFF << 10) == _ADD | register
    assert (at & -4096) + 4096 * address_bits(page) + (rest >> 10 & 0xFFF) == target
    near = written(ARM, ADR, at, target, _ADR | register)
    assert near is not None and at + address_bits(near) == target


@given(at=places, target=places)
def test_a_load_counts_in_its_own_size(at, target):
    word = written(ARM, LOW_LOAD_16, at, target, _LDR_Q)
    if target % 16:
        assert word is None  # the instruction has no bits for it
    else:
        assert word is not None and 16 * (word >> 10 & 0xFFF) == target % 4096


@pytest.mark.parametrize(
    ("kind", "target"), [(CALL, 1 << 27), (CALL, 6), (ADR, 1 << 20), (ADRP, 1 << 32), (LOW_LOAD_16, 8), (12345, 0)]
)
def test_what_an_instruction_cannot_reach(kind, target):
    assert written(ARM, kind, 0, target, _BL) is None


def test_distances_of_data():
    for kind, size in ((260, "<q"), (261, "<i")):
        code = bytearray(24)
        assert ARM.write(code, 8, kind, 3)
        assert struct.unpack_from(size, code, 8) == (-5,)


@given(at=places, slot=places)
def test_a_stub_loads_from_its_slot(at, slot):
    made = ARM.stub(at, slot)
    assert made is not None
    load, jump = struct.unpack("<II", made)
    assert load & 0xFF00001F == 0x58000010 and at + 4 * signed(load >> 5 & 0x7FFFF, 19) == slot
    assert jump == 0xD61F0200
    other = X86.stub(at, slot)
    assert other is not None and at + 6 + struct.unpack("<i", other[2:])[0] == slot


def test_a_slot_too_far_for_a_stub():
    assert ARM.stub(0, 1 << 20) is None and ARM.stub(0, 2) is None


def test_kinds_of_the_other_architecture():
    assert written(X86, 2, 4, 20) == 16
    assert written(X86, CALL, 0, 4) is None and written(ARM, 2, 0, 4) is None
