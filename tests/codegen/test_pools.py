"""Pooling of channels that lie together, and of such that do not, against a plain definition: the largest and means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.conv import bands, pools
from ranvier.codegen.llvm.conv.pools import Counts, pooled
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.library import source
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType, of
from tests.codegen.harness import ISAS, POISON, Runner, aligned
from tests.providers.cpu.compare import agree, one_node

Array = np.ndarray[Any, Any]
TYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int8)]
MEANS = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)]
EVERYWHERE = (-100, 100)
# masks and long vectors as AVX-512 has them, put together by the compiler from what is here
MASKED = replace(ISAS[0], name="masked", vector_bytes=64, registers=32, masks=True, extensions=frozenset())
ANY_ISA = pytest.mark.parametrize("isa", [*ISAS, MASKED], ids=lambda i: i.name)
SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0)


def image(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """[n, h, w, c]; of floats some are special."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    found = rng.normal(size=shape).astype(dtype)
    for value in SPECIAL:
        found[rng.random(shape) < 0.02] = value
    return found


def defined(x: Array, shape: ConvShape, counts: Counts | None = None) -> Array:
    """Windows one by one: the largest of what they have of the image, NaN where there is one; or the sum of it divided
    by what counts."""
    every = shape.out, shape.kernel, shape.strides, shape.dilations, shape.begin, shape.size
    down, across = ([a[k] for a in every] for k in (1, 2))
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    found = np.empty((shape.n, down[0], across[0], shape.cout))

    def places(at: int, axis: list[int]) -> Array:
        _, taps, step, apart, before, _ = axis
        return np.arange(taps) * apart + at * step - before

    for i, j in np.ndindex(down[0], across[0]):
        rows, columns = places(i, down), places(j, across)
        inside = [p[(p >= 0) & (p < axis[-1])] for p, axis in ((rows, down), (columns, across))]
        window = x[:, inside[0]][:, :, inside[1]].reshape(shape.n, -1, shape.cout).astype(np.float64)
        if counts is None:
            found[:, i, j] = window.max(axis=1, initial=lowest)
            continue
        number = counts.number
        if number is None:
            bounds = (rows, counts.rows), (columns, counts.columns)
            number = int(np.prod([((p >= low) & (p < high)).sum() for p, (low, high) in bounds]))
        found[:, i, j] = window.sum(axis=1) / number
    return found.astype(x.dtype)


def by_kernel(
    x: Array, views: list[View], shape: ConvShape, isa: Isa, split: int, counts: Counts | None
) -> Array | None:
    """All elements of the second view's memory, of an image that lies as the first says; None if the kernel takes no
    such pool."""
    launch = pooled(views[0], views[1], shape, isa, counts=counts)
    if launch is None:
        return None
    held, target = (aligned(view.storage.nbytes) for view in views)
    held.view(x.dtype)[:] = x.reshape(-1)
    runner = Runner([launch], isa, {view.storage: each for view, each in zip(views, (held, target))}, split=split)
    runner()
    assert (runner._keep[-1][launch.scratch :] == POISON).all()  # what lies behind scratch
    return target.view(x.dtype)


def memory(x: Array, *sizes: tuple[int, ...]) -> list[Storage]:
    return [Storage("input", int(np.prod(size)) * x.itemsize, index=k) for k, size in enumerate(sizes)]


def together(x: Array, shape: ConvShape, isa: Isa, gap: int, split: int, counts: Counts | None = None) -> Array | None:
    """By the kernel, into pixels that lie ``gap`` elements apart."""
    n, h, w, c = x.shape
    (_, oh, ow), wide = shape.out, c + gap
    given, made = memory(x, x.shape, (n, oh, ow, wide))
    view = View(given, of(x), (n, c, h, w), (h * w * c, 1, w * c, c))
    out = View(made, of(x), (n, c, oh, ow), (oh * ow * wide, 1, ow * wide, wide))
    found = by_kernel(x, [view, out], shape, isa, split, counts)
    if found is None:
        return None
    found = found.reshape(n, oh, ow, wide)
    assert (found[..., c:].view(np.uint8) == POISON).all()
    return found[..., :c]


def behind(x: Array, shape: ConvShape, isa: Isa, gap: int, split: int, counts: Counts | None = None) -> Array | None:
    """The same of channels that lie one behind the other, into ones whose rows lie ``gap`` elements apart."""
    n, h, w, c = x.shape
    (_, oh, ow), wide = shape.out, shape.out[2] + gap
    given, made = memory(x, x.shape, (n, c, oh, wide))
    view = View(given, of(x), (n, c, h, w), (c * h * w, h * w, w, 1))
    out = View(made, of(x), (n, c, oh, ow), (c * oh * wide, oh * wide, wide, 1))
    found = by_kernel(x.transpose(0, 3, 1, 2), [view, out], shape, isa, split, counts)
    if found is None:
        return None
    found = found.reshape(n, c, oh, wide)
    assert (found[..., ow:].view(np.uint8) == POISON).all()
    return found[..., :ow].transpose(0, 2, 3, 1)


def shaped(
    n: int, c: int, size: Any, kernel: Any, strides: Any, begin: Any, out: Any, dilations: Any = (1, 1)
) -> ConvShape:
    return ConvShape(
        n=n,
        group=c,
        cin=c,
        cout=c,
        size=(1, *size),
        out=(1, *out),
        kernel=(1, *kernel),
        strides=(1, *strides),
        dilations=(1, *dilations),
        begin=(0, *begin),
    )


def drawn(data: st.DataObject) -> tuple[ConvShape, list[int]]:
    """A pool, and the pads behind its image."""

    def two(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))

    n, c = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3, 8, 17, 24, 64, 70]))
    size, kernel, strides = two(1, 14), data.draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (5, 2), (1, 4)])), two(1, 3)
    dilations = data.draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 3)]))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    begin, end = ([data.draw(st.integers(0, k)) for k in spans] for _ in range(2))  # first windows may lie outside
    up = data.draw(st.booleans())  # a last window that leaves the borders
    rest = [a + b + e - k for a, b, e, k in zip(size, begin, end, spans)]
    assume(all(r >= 0 for r in rest))
    out = [(-(-r // s) if up else r // s) + 1 for r, s in zip(rest, strides)]
    return shaped(n, c, size, kernel, strides, begin, out, dilations), end


def left_to_loops(shape: ConvShape) -> bool:
    """Of channels one behind the other: one result in a line, or some that lie apart, all inside."""
    axes = list(zip(shape.out, shape.strides, shape.kernel, shape.dilations, shape.size))
    inside = all((o - 1) * s + (k - 1) * d + 1 <= a for o, s, k, d, a in axes)
    return inside and not any(shape.begin) and (shape.strides[2] > 1 or shape.out[2] == 1)


@ANY_ISA
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_largest(isa: Isa, dtype: np.dtype[Any], data: st.DataObject) -> None:
    shape, _ = drawn(data)
    x = image((shape.n, *shape.size[1:], shape.cout), dtype, data.draw(st.integers(0, 99)))
    how = isa, data.draw(st.sampled_from([0, 5])), data.draw(st.sampled_from([1, 3]))
    way = data.draw(st.sampled_from([together, behind]))
    got = way(x, shape, *how)
    if got is None:
        assert way is behind and left_to_loops(shape)
        return
    with np.errstate(invalid="ignore"):
        want = defined(x, shape)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@ANY_ISA
@pytest.mark.parametrize("dtype", MEANS, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_means(isa: Isa, dtype: np.dtype[Any], data: st.DataObject) -> None:
    shape, end = drawn(data)
    high = [a + e for a, e in zip(shape.size[1:], end)]
    counts = data.draw(
        st.sampled_from(
            [
                Counts(int(np.prod(shape.kernel))),
                Counts(None, (0, shape.size[1]), (0, shape.size[2])),
                Counts(None, (-shape.begin[1], high[0]), (-shape.begin[2], high[1])),
                Counts(None, EVERYWHERE, (0, shape.size[2])),
                Counts(None, (0, shape.size[1])),
            ]
        )
    )
    x = image((shape.n, *shape.size[1:], shape.cout), dtype, data.draw(st.integers(0, 99)))
    how = isa, data.draw(st.sampled_from([0, 5])), data.draw(st.sampled_from([1, 3]))
    way = data.draw(st.sampled_from([together, behind]))
    got = way(x, shape, *how, counts)
    if got is None:
        assert way is behind and left_to_loops(shape)
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        want = defined(x, shape, counts)
    close = {"float32": 2e-6, "float64": 1e-14, "float16": 1e-3, "bfloat16": 8e-3}[dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=close, atol=close)


def test_means_are_added_in_float32() -> None:
    x = np.full((1, 3, 3, 8), 60000, np.float16)
    shape = shaped(1, 8, (3, 3), (3, 3), (1, 1), (0, 0), (1, 1))
    np.testing.assert_array_equal(together(x, shape, ISAS[0], 0, 1, Counts(9)), x[:, :1, :1])


def test_others_are_left_to_loops() -> None:
    x = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 1, 32, 4))
    out = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 1, 32, 4))
    usual = shaped(1, 4, (8, 8), (3, 3), (1, 1), (1, 1), (8, 8))
    assert pooled(x, out, usual, ISAS[0]) is not None
    planes = View(x.storage, DType.float32, x.shape, (256, 64, 8, 1))
    assert pooled(planes, out, usual, ISAS[0]) is None
    assert pooled(planes, planes, usual, ISAS[0]) is not None
    steps = View(x.storage, DType.float32, (1, 4, 4, 4), (64, 16, 4, 1))
    assert pooled(planes, steps, shaped(1, 4, (8, 8), (2, 2), (2, 2), (0, 0), (4, 4)), ISAS[0]) is not None
    steps = View(x.storage, DType.float32, (1, 4, 2, 2), (16, 4, 2, 1))
    assert pooled(planes, steps, shaped(1, 4, (8, 8), (4, 4), (4, 4), (0, 0), (2, 2)), ISAS[0]) is None
    one = View(x.storage, DType.float32, (1, 4, 1, 1), (4, 1, 1, 1))
    assert pooled(planes, one, shaped(1, 4, (8, 8), (8, 8), (1, 1), (0, 0), (1, 1)), ISAS[0]) is None
    wide = View(x.storage, DType.float64, x.shape, x.strides)
    assert pooled(wide, wide, usual, ISAS[0]) is None
    assert pooled(wide, wide, usual, ISAS[0], counts=Counts(9)) is not None
    assert pooled(wide, x, usual, ISAS[0], counts=Counts(9)) is None
    nothing = View(x.storage, DType.float32, (1, 4, 8, 0), (0, 1, 0, 4))
    assert pooled(nothing, out, shaped(1, 4, (8, 0), (3, 3), (1, 1), (1, 5), (8, 8)), ISAS[0]) is None
    codes = View(x.storage, DType.uint8, x.shape, x.strides)
    assert pooled(codes, codes, usual, ISAS[0], counts=Counts(9)) is None


def test_numbers_to_divide_by_have_memory() -> None:
    x = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 1, 32, 4))
    out = View(Storage("input", 0), DType.float32, (1, 4, 4, 4), (64, 1, 16, 4))
    shape = shaped(1, 4, (8, 8), (2, 2), (2, 2), (0, 0), (4, 4))  # small, and inside of the image
    for counts, some in ((None, False), (Counts(4), False), (Counts(None, (0, 8), (0, 8)), True)):
        launch = pooled(x, out, shape, ISAS[0], counts=counts)
        assert launch is not None and (launch.scratch > 0) == some


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])
def test_means_for_another_machine(name: str) -> None:
    isa = named(name, "x86_64")
    for size, stride in ((8, 1), (4, 2)):
        x = View(Storage("input", 0), DType.float32, (1, 4, 8, 8), (256, 64, 8, 1))
        out = View(Storage("input", 0), DType.float32, (1, 4, size, size), (4 * size**2, size**2, size, 1))
        shape = shaped(1, 4, (8, 8), (3, 3), (stride, stride), (1, 1), (size, size))
        launch = pooled(x, out, shape, isa, counts=Counts(None, (0, 8), (0, 8)))
        assert launch is not None
        assert "divps" in compiler.assembly(source(launch.spec, isa), isa)


# -- from models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Launch | None]:
    """What became of pools that were met."""
    found: list[Launch | None] = []
    before = pools.pooled

    def noted(*args: Any, **how: Any) -> Launch | None:
        found.append(before(*args, **how))
        return found[-1]

    monkeypatch.setattr(pools, "pooled", noted)
    return found


@pytest.mark.parametrize("pads", [[0, 2, 0, 0], [1, 2, 1, 2], [0, 2, 0, 2], [2, 0, 2, 0]])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_pads_as_wide_as_the_image(op: str, pads: list[int], taken: list[Launch | None]) -> None:
    """Columns before it are not rows above it, although they lie as far from its beginning."""
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 2)).astype(np.float32)
    agree(one_node(op, [x], {"kernel_shape": [3, 2], "pads": pads}), {"x0": x})
    assert [each is not None for each in taken] == [True]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(
    "attrs",
    [
        {"pads": [1, 1, 1, 1]},
        {"pads": [1, 0, 2, 2], "strides": [2, 2], "ceil_mode": 1},
        {"pads": [0, 2, 0, 1], "strides": [1, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 1]},
        {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID"},
        {"strides": [2, 3], "ceil_mode": 1},
        {"dilations": [2, 3], "pads": [2, 2, 1, 3]},
        {"dilations": [1, 2]},
    ],
    ids=str,
)
def test_models(dtype: Any, include: int, attrs: dict[str, Any], taken: list[Launch | None]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 11, 14)).astype(dtype)
    model = one_node("AveragePool", [x], {"kernel_shape": [3, 3], "count_include_pad": include, **attrs})
    close = 1e-3 if dtype is np.float16 else 2e-6
    agree(model, {"x0": x}, rtol=close, atol=close)
    assert [each is not None for each in taken] == [True]


def test_means_between_convolutions(taken: list[Launch | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such layers may be taken together with the largest between them, not with means."""
    for name, value in (("_FAR", 0), ("_SAVED", 1e6), ("_NEAR", 48 << 10)):
        monkeypatch.setattr(bands, name, value)
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[1,8,96,96] x, float[32,8,1,1] w, float[8,32,1,1] v) => (float[1,8,48,48] y) {
        a = Conv(x, w)
        b = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(a)
        y = Conv(b, v)
    }"""
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((1, 8, 96, 96)).astype(np.float32)}
    weights = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("w", (32, 8, 1, 1)), ("v", (8, 32, 1, 1)))}
    model = onnx.parser.parse_model(text)
    for name, each in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(each, name))
        model.graph.input.remove(next(i for i in model.graph.input if i.name == name))
    agree(model, feeds, rtol=1e-4, atol=1e-4)
    assert len(taken) == 1 and taken[0] is not None
