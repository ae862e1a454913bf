"""Products with weights of few bits against float64 NumPy on decoded weights, by every way there is."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.codegen.llvm.coded import Accuracy, CodedB, Coding, Groups, coded_matmul, pack_coded
from ranvier.codegen.llvm.coded.adding import multiplies_fours
from ranvier.codegen.llvm.coded.held import held
from ranvier.codegen.llvm.coded.numbers import Layout, Scaling
from ranvier.codegen.llvm.coded.product import takes_codes, takes_digits
from ranvier.codegen.llvm.gemm.pack import multiplies_pairs
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of
from ranvier.codegen.llvm.isa import TILES, Isa, with_extensions
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.dtypes import DType
from ranvier.ops.contrib.levels import IQ4_LEVELS
from ranvier.ops.contrib.weight_only import packed
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
F32 = np.float32
KEPT: dict[Any, Any] = {}  # compiled kernels: later cases use them again


def _ways() -> dict[str, Isa]:
    """Every instruction set of this machine, the best one also without what its extensions offer."""
    best = ISAS[0]
    found = {best.name: best}
    if best.extensions:
        found["no tiles"] = with_extensions(best, best.extensions - TILES)
        found["plain"] = with_extensions(best, frozenset())
    return found | {isa.name: isa for isa in ISAS[1:]}


WAYS = _ways()
ways = pytest.mark.parametrize("isa", WAYS.values(), ids=WAYS)
LEVELS = tuple(float(x) for x in np.sort(np.random.default_rng(3).normal(size=15))) + (0.0,)
FLOAT4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice what they are
CODINGS = {
    "int2": Coding(2),
    "int4": Coding(4),
    "int6": Coding(6),
    "int8": Coding(8),
    "levels4": Coding(4, "levels", LEVELS),
    "levels2": Coding(2, "levels", (0.0, -1.5, 0.25, 2.0)),
    "whole levels4": Coding(4, "levels", (*FLOAT4, *(-x for x in FLOAT4))),
    "whole levels2": Coding(2, "levels", (-1.0, 0.0, 100.0, 2.0)),
    "wide levels4": Coding(4, "levels", tuple(IQ4_LEVELS.tolist())),  # none is zero, and the last is 240 from the first
    "e4m3": Coding(8, "e4m3"),
    "e5m2": Coding(8, "e5m2"),
}
codings = pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)


def meaning(coding: Coding) -> Array:
    """What every code stands for, told by others where there are others."""
    if coding.kind == "e4m3":
        return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if coding.kind == "e5m2":
        return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
    if coding.kind == "levels":
        return np.array(coding.levels)
    return np.arange(1 << coding.bits) - float(1 << (coding.bits - 1))


def stepped(rng: np.random.Generator, n: int, count: int, group: int, least: int) -> Array:
    """Numbers of groups that are integers times a half that 256 weights share; of the first columns nothing."""
    run = 256 // group
    steps = rng.uniform(1e-3, 2e-3, (n, count // run)).astype(np.float16).astype(F32)
    steps[:3] = 0 if least <= 0 else 2.0**-8
    return np.repeat(steps, run, axis=1) * rng.integers(least, 64, (n, count)).astype(F32)


class Weights:
    """Random codes with scales and zero points, packed, and what they stand for in float64."""

    def __init__(
        self,
        coding: Coding,
        k: int,
        n: int,
        group: int,
        isa: Isa,
        *,
        zeros: str = "",
        half: bool = False,
        listed: bool = False,
        shared: bool = False,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        values = meaning(coding)
        fine = np.flatnonzero(np.isfinite(values))
        codes = rng.choice(fine, size=(n, k)).astype(np.uint8)
        count = -(-k // group)
        scales = (rng.uniform(0.01, 0.1, (n, count)) * 2.0 ** (-6 if coding.kind == "e5m2" else 0)).astype(F32)
        if half:
            scales = scales.astype(np.float16).astype(F32)
        if shared:
            scales = stepped(rng, n, count, group, -64 if zeros != "offset" else 1)
        zero = offsets = None
        if zeros == "offset":  # a zero point as those have who divide by scales, in float32
            offsets = stepped(rng, n, count, group, 0)
            zero = (offsets / scales) - F32(coding.middle)
        elif zeros:
            zero = rng.integers(-2, 3, (n, count)).astype(F32) + F32(0.25 if zeros == "float" else 0)
        if listed:
            group_of = rng.integers(0, count, k)
            groups = Groups.listed(group_of, count, coding)
        else:
            group_of = np.arange(k) // group
            groups = Groups.even(k, group, coding)
        self.packed: CodedB = pack_coded(lambda a, b: codes[a:b], coding, n, groups, scales, zero, isa)
        less = 0.0 if zero is None else zero.astype(np.float64)[:, group_of]
        self.matrix = ((values[codes] - less) * scales.astype(np.float64)[:, group_of]).T
        if offsets is not None:
            wide = (values[codes] + coding.middle) * scales.astype(np.float64)[:, group_of]
            self.matrix = (wide - offsets.astype(np.float64)[:, group_of]).T


def product(
    a: Array,
    b: CodedB,
    isa: Isa,
    *,
    out: Array | None = None,
    accuracy: Accuracy = "float32",
    split: int = 1,
    threads: int = 1,
    epilogue: Epilogue | None = None,
    operands: tuple[tuple[Any, Array], ...] = (),
) -> Array:
    if out is None:
        shape = (*a.shape[:-1], b.n)
        out = aligned(int(np.prod(shape, dtype=np.int64)) * 4).view(F32).reshape(shape)
    av, ov = view_of(a), view_of(out, "output")
    launches = coded_matmul(av, b, ov, isa, accuracy=accuracy, threads=threads, epilogue=epilogue)
    bound = {av.storage: a, ov.storage: out, **{v.storage: x for v, x in operands}}
    runner = Runner(launches, isa, bound, split=split, poison=0xFF)
    KEPT.update({(isa.key, spec): kernel for spec, kernel in runner.kernels.items()})
    runner()
    return out


def rows(m: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + 100).standard_normal((m, k)).astype(F32)


def check(got: Array, a: Array, w: Weights, expected: Array | None = None) -> None:
    """What rounding may add up to: of values with and without their zero points."""
    wide = a.astype(np.float64)
    expected = wide @ w.matrix if expected is None else expected
    size = np.abs(wide) @ (np.abs(w.matrix) + np.abs(w.matrix).max())
    np.testing.assert_array_less(np.abs(got - expected), size * np.finfo(F32).eps * 12 + 1e-30)


@ways
@codings
def test_every_coding(isa: Isa, coding: Coding) -> None:
    """Rows of every pass and panels decoded for many, columns around vectors and passes."""
    for (m, n), zeros in itertools.product(
        [(1, 1), (1, 16), (1, 70), (2, 33), (3, 131), (5, 17), (8, 64), (16, 40), (34, 33), (40, 100)],
        ["", "whole", "float"],
    ):
        w = Weights(coding, 96, n, 32, isa, zeros=zeros, half=bool(n % 2), seed=m)
        a = rows(m, 96, m)
        check(product(a, w.packed, isa), a, w)


@ways
@pytest.mark.parametrize("m", [1, 4, 36])
def test_depths_and_groups(isa: Isa, m: int) -> None:
    """Groups that are no whole words, depths that are no whole groups, one group for all, groups in any order."""
    for coding, (k, group), listed in itertools.product(
        [CODINGS[f"int{bits}"] for bits in (2, 4, 6, 8)],
        [(1, 16), (7, 16), (33, 16), (64, 64), (100, 32), (130, 128), (48, 6), (72, 72), (61, 1000)],
        [False, True],
    ):
        for zeros in ("", "whole"):
            w = Weights(coding, k, 37, group, isa, zeros=zeros, listed=listed, seed=k)
            a = rows(m, k, k)
            check(product(a, w.packed, isa), a, w)


@ways
@pytest.mark.parametrize("m", [1, 3, 36])
def test_one_column_of_a_depth_that_is_no_whole_word(isa: Isa, m: int) -> None:
    for coding, accuracy in itertools.product(CODINGS.values(), ("float32", "int8")):
        w = Weights(coding, 61, 1, 16, isa)
        a = rows(m, 61)
        got = product(a, w.packed, isa, accuracy=accuracy)
        if accuracy == "float32" or not coding.whole:
            check(got, a, w)
        else:
            np.testing.assert_allclose(got, a @ w.matrix, atol=0.02 * np.abs(a).max() * np.abs(w.matrix).sum())


@ways
def test_rows_one_to_forty(isa: Isa) -> None:
    w = Weights(Coding(4), 64, 50, 32, isa, zeros="whole")
    for m in range(1, 41):
        a = rows(m, 64, m)
        check(product(a, w.packed, isa, split=1 + m % 3, threads=1 + m % 2), a, w)


@ways
@pytest.mark.parametrize("m", [1, 3, 9, 36])
def test_layouts(isa: Isa, m: int) -> None:
    """Activations with strides, in 16 bits and in batches; results transposed and in batches."""
    w = Weights(Coding(4), 70, 33, 32, isa, zeros="whole")
    plain = Weights(Coding(4), 64, 33, 32, isa)
    for each in (w, plain):
        k = each.packed.k
        a = rows(m, k)
        for laid in (np.asfortranarray(a), rows(m, k + 3)[:, 1 : k + 1], rows(2 * m, 2 * k)[::2, ::2]):
            check(product(laid, each.packed, isa), laid, each)
        for dtype in (np.float16, ml_dtypes.bfloat16):
            narrow = a.astype(dtype)
            check(product(narrow, each.packed, isa), narrow, each)
        turned = aligned(33 * m * 4).view(F32).reshape(33, m).T
        check(product(a, each.packed, isa, out=turned), a, each)
        many = rows(6 * m, k).reshape(2, 3, m, k)
        check(product(many, each.packed, isa), many, each)
        apart = many.transpose(1, 0, 2, 3)
        check(product(apart, each.packed, isa, split=3), apart, each)
        repeated = np.broadcast_to(a, (3, m, k))
        check(product(repeated, each.packed, isa), repeated, each)


@ways
@pytest.mark.parametrize("m", [1, 5, 40])
def test_epilogues(isa: Isa, m: int) -> None:
    w = Weights(Coding(4), 64, 45, 32, isa)
    a, bias, beside = rows(m, 64), rows(1, 45, 5)[0], rows(m, 45, 6)
    bv, rv = view_of(bias), view_of(beside)
    operands = (Operand(bv, (0, 0, 1)), Operand(rv, (0, 45, 1)))
    total: Expr = Op("add", (Result(0, DType.float32), Load(0, DType.float32)), DType.float32)
    total = Op("mul", (total, Load(1, DType.float32)), DType.float32)
    value = Op("max", (total, Const(0.0, DType.float32)), DType.float32)
    epilogue = Epilogue(value, operands)
    got = product(a, w.packed, isa, epilogue=epilogue, operands=((bv, bias), (rv, beside)))
    expected = np.maximum((a.astype(np.float64) @ w.matrix + bias) * beside, 0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def quantized(a: Array, groups: Groups) -> Array:
    """Activations as codes of 8 bits with a step for every group stand for them."""
    found = np.zeros(a.shape)
    for members in groups.order:
        there = members[members >= 0]
        if not len(there):
            continue
        part = a[..., there]
        largest = np.abs(part).max(axis=-1, keepdims=True)
        factor = np.divide(F32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        found[..., there] = np.rint(part * factor) * (largest * F32(1 / 127)).astype(np.float64)
    return found


@ways
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("accuracy", ["float32", "int8"])
def test_largest_sums(isa: Isa, bits: int, accuracy: Accuracy) -> None:
    """All products of a group have the same sign and the largest size: in groups whose sums still fit the low bits of a
    float, and in groups whose sums do not."""
    coding, n = Coding(bits), 130
    edges = [0, (1 << bits) - 1]
    for group, sign, edge, m in itertools.product([16, 128, 256, 512, 16384], [1, -1], edges, [1, 14]):
        scales = np.full((n, 1), 0.5, F32)
        groups = Groups.even(group, group, coding)

        def codes(first: int, end: int, k: int = group, edge: int = edge) -> Array:
            return np.full((end - first, k), edge, np.uint8)

        packed = pack_coded(codes, coding, n, groups, scales, None, isa)
        a = np.full((m, group), sign, F32)
        expected = np.full((m, n), sign * group * (edge - coding.middle) * 0.5)
        np.testing.assert_allclose(product(a, packed, isa, accuracy=accuracy), expected, rtol=2e-6)


@ways
def test_sums_of_long_groups(isa: Isa) -> None:
    """A single scale for more k than 32 bits have room for sums of codes."""
    coding, k, n = Coding(8), 140_000, 3
    lowest = pack_coded(
        *(lambda first, end: np.zeros((end - first, k), np.uint8), coding, n, Groups.even(k, k, coding)),
        *(np.ones((n, 1), F32), None, isa),
    )
    got = product(np.ones((1, k), F32), lowest, isa, accuracy="int8")
    np.testing.assert_allclose(got, np.full((1, n), -128.0 * k), rtol=1e-5)


def test_groups_of_uneven_length_take_little_room() -> None:
    """A table that puts all of K in one of many groups makes no more than twice the codes."""
    coding, k, count = Coding(4), 1024, 64
    for group_of in (np.full(k, 5), np.arange(k) % count, np.minimum(np.arange(k), count - 1)):
        groups = Groups.listed(group_of, count, coding)
        assert groups.order.size <= 2 * k + coding.per_word * count
        assert groups.given is not None
        there = groups.order >= 0
        np.testing.assert_array_equal(np.sort(groups.order[there]), np.arange(k))
        np.testing.assert_array_equal(group_of[groups.order[there]], np.repeat(groups.given, there.sum(axis=1)))


@ways
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_bytes_that_are_full_give_the_same(isa: Isa, bits: int) -> None:
    """Whole panels and less, groups of whole words and others, and an order of k."""
    coding, rng = held(bits, isa, np.empty((0, 1), np.uint8), 0), np.random.default_rng(bits)
    raised = np.uint8(coding.middle - (1 << (bits - 1)))  # what stands for the same in more bits
    for n, (k, group), listed in itertools.product([1, 40, 600], [(64, 32), (96, 48), (60, 20), (200, 24)], [0, 1]):
        codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
        count = -(-k // group)
        groups = Groups.listed(rng.integers(0, count, k), count, coding) if listed else Groups.even(k, group, coding)
        about = (rng.random((n, count)).astype(F32), None, isa)
        apart = pack_coded(lambda a, b, c=codes + raised: c[a:b], coding, n, groups, *about)
        full = packed(np.pad(codes, ((0, 0), (0, 16)), constant_values=1), bits)  # more than K, as blocks may have
        same = pack_coded(lambda a, b, c=full: c[a:b], coding, n, groups, *about, filled=True, bits=bits)
        assert apart.codes.array is not None and same.codes.array is not None
        np.testing.assert_array_equal(same.codes.array, apart.codes.array)


@ways
def test_many_rows_as_codes(isa: Isa) -> None:
    """Of many rows each is what it is alone, where they are multiplied as integers; as near as rounding elsewhere."""
    w = Weights(Coding(4), 96, 70, 32, isa, zeros="whole")
    a = rows(50, 96)
    got = product(a, w.packed, isa, accuracy="int8", split=3, threads=2)
    alone = np.concatenate([product(row[None], w.packed, isa, accuracy="int8") for row in a])
    if multiplies_fours(isa) and not isa.extensions & TILES:
        np.testing.assert_array_equal(got, alone)
    else:
        np.testing.assert_allclose(got, alone, rtol=0, atol=0.02 * np.abs(alone).max())


@ways
@pytest.mark.parametrize("name", ["int2", "int4", "int6", "int8", "whole levels4", "wide levels4"])
def test_activations_as_codes(isa: Isa, name: str) -> None:
    """The same as multiplying rounded activations where integers are multiplied; no worse than that elsewhere."""
    coding = CODINGS[name]
    for m, (k, group), zeros in itertools.product(
        [1, 2, 5, 8, 32, 34], [(64, 32), (70, 16), (256, 128), (20, 1000)], ["", "whole", "float"]
    ):
        if m > 32 and isa.extensions & TILES:
            continue  # those are multiplied in bfloat16
        w = Weights(coding, k, 50, group, isa, zeros=zeros, seed=m)
        a = rows(m, k, m)
        a[0, : min(group, k)] = 0
        got = product(a, w.packed, isa, accuracy="int8")
        if takes_codes(w.packed, m, isa):
            expected = quantized(a, Groups.even(k, group, coding)) @ w.matrix
            check(got, a, w, expected)
        else:
            check(got, a, w)


@ways
@pytest.mark.parametrize("accuracy", ["bfloat16", "int8"])
def test_many_rows_in_pairs(isa: Isa, accuracy: Accuracy) -> None:
    """Both sides rounded to bfloat16 at most."""
    for (m, n), (k, group), name in itertools.product(
        [(12, 40), (33, 33), (36, 100), (70, 64)], [(64, 32), (100, 16), (7, 16)], ["int4", "int6", "levels4", "e4m3"]
    ):
        w = Weights(CODINGS[name], k, n, group, isa, zeros="whole", seed=m)
        a = rows(m, k, m)
        got = product(a, w.packed, isa, accuracy=accuracy, split=2)
        size = np.abs(a.astype(np.float64)) @ np.abs(w.matrix)
        limit = 2.0**-6 if accuracy == "int8" else 2.0**-7
        np.testing.assert_array_less(np.abs(got - a.astype(np.float64) @ w.matrix), size * limit + 1e-30)


def test_rows_that_are_not_numbers_stay_so() -> None:
    w = Weights(Coding(4), 64, 20, 32, ISAS[0])
    a = rows(3, 64)
    a[0, 5], a[1, 40] = np.nan, np.inf
    for accuracy in ("float32", "int8"):
        got = product(a, w.packed, ISAS[0], accuracy=accuracy)
        assert not np.isfinite(got[:2]).any()
        assert np.isfinite(got[2]).all()


def test_scales_that_halves_can_hold_are_kept_as_such() -> None:
    assert Weights(Coding(4), 128, 20, 64, ISAS[0], half=True).packed.scales.layout == Layout(DType.float16)
    assert Weights(Coding(4), 64, 20, 32, ISAS[0]).packed.scales.layout == Layout(DType.float32)


@ways
@pytest.mark.parametrize(
    ("name", "group", "zeros"),
    [
        ("int4", 32, "offset"),
        ("int4", 32, ""),
        ("int2", 16, "offset"),
        ("int6", 32, "offset"),
        ("int6", 16, ""),
        ("int8", 16, ""),
        ("int4", 32, "whole"),
        ("levels4", 32, ""),
        ("whole levels4", 32, ""),
    ],
)
def test_groups_that_share_a_step(isa: Isa, name: str, group: int, zeros: str) -> None:
    """Scales, and what zero points subtract, are a byte each; results are what they are of float32."""
    for n, k in [(20, 512), (150, 256)]:
        w = Weights(CODINGS[name], k, n, group, isa, zeros=zeros, shared=True, seed=n)
        run = Layout(DType.float32) if dot_of(isa) is SIGNED else Layout(DType.int8, 256 // group)
        assert w.packed.scales.layout == run
        if zeros:
            assert w.packed.zeros.layout == (run if zeros == "offset" else Layout(DType.int8))
        for m in (1, 2, 5, 18, 40):
            a = rows(m, k, m)
            check(product(a, w.packed, isa, split=2), a, w)
            size = np.abs(a.astype(np.float64)) @ np.abs(w.matrix)
            got = product(a, w.packed, isa, accuracy="int8", split=2)
            np.testing.assert_array_less(np.abs(got - a.astype(np.float64) @ w.matrix), size * 2.0**-6 + 1e-30)
            a = np.random.default_rng(m).integers(-127, 128, (m, k)).astype(F32)
            a[:, ::group] = 127  # codes as they are
            if m < (33 if w.packed.coding.whole else 12) or not multiplies_pairs(isa):  # else weights become bfloat16
                check(product(a, w.packed, isa, accuracy="int8"), a, w)


@ways
def test_minima_that_halves_hold_are_offsets(isa: Isa) -> None:
    rng, coding, n, k = np.random.default_rng(7), CODINGS["int4"], 40, 96
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales, minima = (rng.uniform(1e-3, 1e-2, (n, 3)).astype(np.float16).astype(F32) for _ in range(2))
    zeros = minima / scales - F32(8)
    b = pack_coded(lambda i, j: codes[i:j], coding, n, Groups.even(k, 32, coding), scales, zeros, isa)
    if dot_of(isa) is not SIGNED:
        assert b.scaling == Scaling(Layout(DType.float16), Layout(DType.float16), 8)
    wanted = codes * np.repeat(scales, 32, axis=1).astype(np.float64) - np.repeat(minima, 32, axis=1)
    for m in (1, 3, 20):
        a = np.random.default_rng(m).integers(-127, 128, (m, k)).astype(F32)
        a[:, ::32] = 127
        for accuracy in ("float32", "int8"):
            got = product(a, b, isa, accuracy=accuracy)
            np.testing.assert_allclose(got, a @ wanted.T, rtol=1e-5, atol=1e-3)


@ways
@pytest.mark.parametrize(("scale", "zero"), [(3 * 2.0**-24, 1), (50000, 1), (0.5, 100), (0.5, 2.5)])
def test_scales_and_zeros_of_coupled_columns_are_held_exactly(isa: Isa, scale: float, zero: float) -> None:
    """16 times a scale that halves hold may be none, and 16 times a zero no byte."""
    rng, coding = np.random.default_rng(5), CODINGS["int4"]
    codes, scales = rng.integers(0, 16, (24, 64)).astype(np.uint8), np.full((24, 2), scale, F32)
    zeros, a = np.full((24, 2), zero, F32), rng.integers(-127, 128, (3, 64)).astype(F32)
    a[:, ::32] = 127  # so activations are codes as they are
    b = pack_coded(lambda i, j: codes[i:j], coding, 24, Groups.even(64, 32, coding), scales, zeros, isa)
    wanted = a.astype(np.float64) @ ((codes - 8.0 - zero) * scale).T
    np.testing.assert_allclose(product(a, b, isa, accuracy="int8"), wanted, rtol=1e-6)


@ways
@pytest.mark.parametrize("name", ["int2", "int4", "int6", "int8", "whole levels2", "whole levels4", "wide levels4"])
def test_single_rows_to_the_full(isa: Isa, name: str) -> None:
    """Where bytes are multiplied a row becomes digits: numbers far apart in size, and columns around passes."""
    coding = CODINGS[name]
    cases = [(256, 32, ""), (200, 48, "whole"), (96, 16, "float"), (130, 130, "")]
    for (k, group, zeros), n in itertools.product(cases, [128, 150, 213]):
        w = Weights(coding, k, n, group, isa, zeros=zeros, half=n == 150)
        a = rows(1, k) * (10.0 ** np.random.default_rng(k + n).integers(-5, 5, k)).astype(F32)
        check(product(a, w.packed, isa, threads=2, split=3), a, w)
        check(product(a * F32(2.0**-90), w.packed, isa), a * F32(2.0**-90), w)
        check(product(np.zeros_like(a), w.packed, isa), np.zeros_like(a), w)
    w = Weights(coding, 96, 150, 32, isa, zeros="whole")
    for m in (2, 3, 7, 8, 17, 32):
        a = rows(m, 96) * (10.0 ** np.random.default_rng(m).integers(-5, 5, (m, 1))).astype(F32)
        check(product(a, w.packed, isa, threads=2, split=2), a, w)
        a[1, 5] = np.inf
        found = product(a, w.packed, isa)
        others = np.delete(a, 1, axis=0)
        check(np.delete(found, 1, axis=0), others, w)  # no other row shows it
        assert not np.isfinite(found[1]).any() or not takes_digits(w.packed, m, isa)
    w = Weights(coding, 200, 140, 50, isa, listed=True, zeros="whole")
    a = rows(3, 200)
    check(product(a[:1], w.packed, isa), a[:1], w)
    apart = np.repeat(a.astype(np.float16), 2, axis=1)[1:2, ::2]
    check(product(apart, w.packed, isa), apart, w)


@ways
def test_a_large_number_that_weighs_nothing_hides_no_others(isa: Isa) -> None:
    k, n = 64, 160
    w = Weights(CODINGS["int4"], k, n, 32, isa)
    codes = np.full((n, k), 9, np.uint8)
    codes[:, 5] = 8  # stands for zero
    scales = np.ones((n, 2), F32)
    packed = pack_coded(
        lambda a, b: codes[a:b], CODINGS["int4"], n, Groups.even(k, 32, w.packed.coding), scales, None, isa
    )
    a = np.ones((1, k), F32)
    a[0, 5] = 1e5
    np.testing.assert_allclose(product(a, packed, isa), np.full((1, n), k - 1.0), rtol=1e-4)


@ways
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(isa: Isa, value: float) -> None:
    w = Weights(CODINGS["int4"], 96, 140, 32, isa)
    a = rows(1, 96)
    a[0, 40] = value
    assert not np.isfinite(product(a, w.packed, isa)).any()
