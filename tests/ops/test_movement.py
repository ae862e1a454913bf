"""Laws of the operators that rearrange, cut, join, index and create tensors, checked on random operands."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ranvier.ops.tensor.creation
import ranvier.ops.tensor.indexing
import ranvier.ops.tensor.movement  # noqa: F401
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, ResourceLimit, ShapeMismatch
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.registry import evaluate

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)
HUGE = np.iinfo(np.int64).max
DTYPES = [np.dtype(d) for d in (np.float32, np.int64, bool, ml_dtypes.bfloat16, ml_dtypes.int4, object)]


def law(*strategies):
    """``@given`` with few enough examples that the whole file stays quick."""
    return lambda test: settings(max_examples=40, deadline=None)(given(*strategies)(test))


def ints(*values):
    return np.array(values, np.int64)


def numbered(shape):
    """A tensor whose elements are all different, so that a misplaced one shows."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


tensors = SHAPES.map(numbered)


# -- rearranging ----------------------------------------------------------------------------------------------------


@law(tensors, st.data())
def test_transpose_and_its_inverse(x, data):
    perm = data.draw(st.permutations(range(x.ndim)))
    moved = evaluate("Transpose", x, perm=tuple(perm))
    assert moved.shape == tuple(x.shape[p] for p in perm)
    np.testing.assert_array_equal(evaluate("Transpose", moved, perm=tuple(np.argsort(perm).tolist())), x)
    np.testing.assert_array_equal(evaluate("Transpose", evaluate("Transpose", x)), x)


@law(tensors, st.data())
def test_reshape_keeps_the_order(x, data):
    flat = evaluate("Reshape", x, ints(-1))
    assert flat.tolist() == list(range(x.size))
    zeros = ints(*(0 for _ in x.shape))
    np.testing.assert_array_equal(evaluate("Reshape", x, zeros), x)
    target = data.draw(st.permutations(x.shape))
    np.testing.assert_array_equal(evaluate("Reshape", flat, ints(*target)), numbered(tuple(target)))
    np.testing.assert_array_equal(evaluate("Reshape", x, version=1, shape=(-1,)), flat)
    axis = data.draw(st.integers(-x.ndim, x.ndim))
    split = axis if axis >= 0 else axis + x.ndim
    assert evaluate("Flatten", x, axis=axis).shape == (math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def test_reshape_of_empty_tensors():
    empty = np.zeros((0, 3), np.float32)
    assert evaluate("Reshape", empty, ints(0, -1)).shape == (0, 3)
    assert evaluate("Reshape", empty, ints(3, 0), allowzero=1).shape == (3, 0)
    assert evaluate("Reshape", np.zeros(1), ints()).shape == ()


@law(tensors, st.data())
def test_squeeze_undoes_unsqueeze(x, data):
    rank = x.ndim + 2
    axes = data.draw(st.lists(st.integers(-rank, rank - 1), min_size=2, max_size=2, unique_by=lambda a: a % rank))
    wide = evaluate("Unsqueeze", x, ints(*axes))
    assert wide.ndim == rank and all(wide.shape[a] == 1 for a in axes)
    np.testing.assert_array_equal(evaluate("Squeeze", wide, ints(*axes)), x)
    np.testing.assert_array_equal(evaluate("Unsqueeze", x, version=11, axes=tuple(axes)), wide)
    assert evaluate("Squeeze", wide).shape == tuple(s for s in x.shape if s != 1)


@law(st.tuples(*[st.integers(1, 3)] * 4), st.integers(1, 3), st.sampled_from(["DCR", "CRD"]))
def test_space_to_depth_undoes_depth_to_space(shape, block, mode):
    n, c, h, w = shape
    x = numbered((n, c * block * block, h, w))
    space = evaluate("DepthToSpace", x, blocksize=block, mode=mode)
    assert space.shape == (n, c, h * block, w * block)
    np.testing.assert_array_equal(evaluate("SpaceToDepth", space, blocksize=block, mode=mode), x)


@law(st.integers(1, 4), st.integers(1, 5), st.data())
def test_reverse_sequence_twice_is_identity(batch, steps, data):
    lengths = ints(*(data.draw(st.integers(0, steps)) for _ in range(batch)))
    x = numbered((batch, steps, 2))
    turned = evaluate("ReverseSequence", x, lengths, batch_axis=0, time_axis=1)
    for row, original, length in zip(turned, x, lengths):
        np.testing.assert_array_equal(row, np.concatenate([original[:length][::-1], original[length:]]))
    np.testing.assert_array_equal(evaluate("ReverseSequence", turned, lengths, batch_axis=0, time_axis=1), x)
    time_first = evaluate("ReverseSequence", x.swapaxes(0, 1), lengths)
    np.testing.assert_array_equal(time_first.swapaxes(0, 1), turned)


@law(hnp.array_shapes(min_dims=2, max_dims=3, max_side=5).map(numbered), st.integers(-7, 7))
def test_triangles_add_up(x, k):
    upper = evaluate("Trilu", x, np.array(k), upper=1)
    lower = evaluate("Trilu", x, np.array(k - 1), upper=0)
    np.testing.assert_array_equal(upper, np.triu(x, k))
    np.testing.assert_array_equal(upper + lower, x)


# -- cutting and joining --------------------------------------------------------------------------------------------


@law(tensors, st.data())
def test_concat_undoes_split(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size])]
    outputs = max(len(sizes), 2)
    sizes += [0] * (outputs - len(sizes))
    parts = evaluate("Split", x, ints(*sizes), axis=axis, outputs=outputs)
    assert [p.shape[axis] for p in parts] == sizes
    np.testing.assert_array_equal(evaluate("Concat", *parts, axis=axis), x)
    old = evaluate("Split", x, axis=axis, split=tuple(sizes), version=2, outputs=outputs)
    for a, b in zip(parts, old):
        np.testing.assert_array_equal(a, b)


def test_split_into_a_number_of_parts():
    x = numbered((7,))
    assert [p.size for p in evaluate("Split", x, num_outputs=3, outputs=3)] == [3, 3, 1]
    assert [p.size for p in evaluate("Split", x[:6], outputs=3, version=13)] == [2, 2, 2]
    with pytest.raises(InvalidValue, match="Split: 7 elements cannot be cut into 3 equal parts"):
        evaluate("Split", x, outputs=3, version=13)


bounds = st.integers(-7, 7) | st.sampled_from([HUGE, -HUGE - 1])


@law(tensors, bounds, bounds, st.integers(-3, 3).filter(bool), st.data())
def test_slice_agrees_with_python(x, start, stop, step, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[axis]
    if step < 0:
        start = max(start, -size)  # the standard clamps a start before the first element, Python finds nothing
    chosen = list(range(size))[start:stop:step]
    sliced = evaluate("Slice", x, ints(start), ints(stop), ints(axis), ints(step))
    np.testing.assert_array_equal(sliced, np.take(x, ints(*chosen), axis=axis))
    if step == 1:
        np.testing.assert_array_equal(
            evaluate("Slice", x, version=1, starts=(start,), ends=(stop,), axes=(axis % x.ndim,)), sliced
        )


def test_slice_backwards_from_before_the_start():
    assert evaluate("Slice", numbered((3,)), ints(-100), ints(-HUGE - 1), ints(0), ints(-1)).tolist() == [0]


@law(
    SHAPES.filter(lambda s: len(s) < 4).map(numbered),
    st.sampled_from(["constant", "reflect", "edge", "wrap"]),
    st.data(),
)
def test_pad_agrees_with_numpy_and_crops(x, mode, data):
    amounts = [(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))) for _ in x.shape]
    pads = ints(*(a for a, _ in amounts), *(b for _, b in amounts))
    padded = evaluate("Pad", x, pads, mode=mode)
    np.testing.assert_array_equal(padded, np.pad(x, amounts, mode=mode))
    np.testing.assert_array_equal(evaluate("Pad", padded, -pads), x)
    axes = ints(*reversed(range(x.ndim)))
    swapped = ints(*(a for a, _ in reversed(amounts)), *(b for _, b in reversed(amounts)))
    np.testing.assert_array_equal(evaluate("Pad", x, swapped, None, axes, mode=mode), padded)


def test_old_pads_take_attributes():
    x = np.ones((1, 2), np.float32)
    expected = [[7, 1, 1], [7, 7, 7]]
    assert evaluate("Pad", x, version=2, pads=(0, 1, 1, 0), value=7.0).tolist() == expected
    assert evaluate("Pad", x, version=1, paddings=(0, 1, 1, 0), value=7.0).tolist() == expected
    assert evaluate("Pad", x, ints(0, 1, 1, 0), np.float32([7])).tolist() == expected


@law(tensors, st.data())
def test_tile_and_expand(x, data):
    repeats = [data.draw(st.integers(0, 3)) for _ in x.shape]
    np.testing.assert_array_equal(evaluate("Tile", x, ints(*repeats)), np.tile(x, repeats))
    grown = evaluate("Expand", x, ints(2, *(1 for _ in x.shape)))
    np.testing.assert_array_equal(grown, np.stack([x, x]))
    assert not np.shares_memory(grown, x)


@law(tensors, st.data())
def test_center_crop_of_center_pad_is_identity(x, data):
    target = [size + 2 * data.draw(st.integers(0, 2)) for size in x.shape]
    padded = evaluate("CenterCropPad", x, ints(*target))
    assert padded.shape == tuple(target) and padded.sum() == x.sum()
    np.testing.assert_array_equal(evaluate("CenterCropPad", padded, ints(*x.shape)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movement_keeps_every_dtype(dtype):
    x = np.array([["a", "b"], ["c", "d"]], object) if dtype.kind == "O" else numbered((2, 2)).astype(dtype)
    calls = [
        ("Reshape", [x, ints(-1)], {}),
        ("Transpose", [x], {}),
        ("Concat", [x, x], {"axis": 0}),
        ("Slice", [x, ints(0), ints(1)], {}),
        ("Pad", [x, ints(1, 0, 0, 1)], {}),
        ("Tile", [x, ints(2, 1)], {}),
        ("Expand", [x, ints(2, 1, 1)], {}),
        ("Gather", [x[0], np.array(1)], {}),
        ("GatherND", [x, ints(0, 1)], {}),
        ("GatherElements", [x, np.array([[1, 0]])], {}),
        ("ScatterElements", [x, np.array([[1, 0]]), x[:1]], {}),
        ("ScatterND", [x, np.array([[1]]), x[:1]], {}),
        ("Compress", [x, np.array([False, True])], {"axis": 1}),
        ("CenterCropPad", [x, ints(3, 1)], {}),
        ("OneHot", [ints(0, 2), np.array(3), x[0]], {}),
        ("Unique", [x], {"axis": 0}),
    ]
    for name, operands, attrs in calls:
        before = x.copy()
        result = evaluate(name, *operands, **attrs)
        assert isinstance(result, np.ndarray) and result.dtype == dtype, name
        np.testing.assert_array_equal(x, before, err_msg=f"{name} changed its operand")


# -- indexing -------------------------------------------------------------------------------------------------------


@law(tensors, st.data())
def test_gather_agrees_with_take(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[axis]
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
    indices = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(-size, size - 1)))
    np.testing.assert_array_equal(evaluate("Gather", x, indices, axis=axis), np.take(x, indices, axis=axis))


@law(tensors, st.data())
def test_gather_and_scatter_elements(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    order = data.draw(st.permutations(range(x.shape[axis])))
    along = [1] * x.ndim
    along[axis] = len(order)
    indices = np.broadcast_to(ints(*order).reshape(along), x.shape)
    picked = evaluate("GatherElements", x, indices, axis=axis)
    np.testing.assert_array_equal(picked, np.take_along_axis(x, indices, axis))
    for name, version in (("ScatterElements", 18), ("Scatter", 9)):
        placed = evaluate(name, np.zeros_like(x), indices, picked, axis=axis, version=version)
        np.testing.assert_array_equal(placed, x)
    # indices may cover only a corner of the data
    corner = indices[tuple(slice(0, 1) for _ in x.shape)]
    assert evaluate("GatherElements", x, corner, axis=axis).shape == corner.shape


@law(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_gather_nd_agrees_with_a_loop(rows, columns, count, data):
    x = numbered((rows, columns, 2))
    index = st.tuples(st.integers(-rows, rows - 1), st.integers(-columns, columns - 1))
    tuples = np.array([data.draw(index) for _ in range(count)])
    np.testing.assert_array_equal(evaluate("GatherND", x, tuples), [x[i, j] for i, j in tuples])
    per_batch = np.array([[[data.draw(st.integers(-columns, columns - 1))]] for _ in range(rows)])
    batched = evaluate("GatherND", x, per_batch, batch_dims=1)
    np.testing.assert_array_equal(batched, [[x[r, per_batch[r, 0, 0]]] for r in range(rows)])


@law(st.integers(1, 4), st.integers(1, 6), st.data())
def test_scatter_reductions_agree_with_a_loop(size, count, data):
    places = [data.draw(st.integers(-size, size - 1)) for _ in range(count)]
    x = data.draw(hnp.arrays(np.int64, (size, 2), elements=st.integers(-9, 9)))
    updates = data.draw(hnp.arrays(np.int64, (count, 2), elements=st.integers(-9, 9)))
    functions = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for reduction, function in functions.items():
        expected = x.copy()
        for place, update in zip(places, updates):
            expected[place] = function(expected[place], update)
        result = evaluate("ScatterND", x, np.array(places)[:, None], updates, reduction=reduction)
        np.testing.assert_array_equal(result, expected)
        indices = np.repeat(np.array(places)[:, None], 2, axis=1)
        np.testing.assert_array_equal(evaluate("ScatterElements", x, indices, updates, reduction=reduction), expected)


def test_half_precision_scatter_add_rounds_once():
    ones = np.full(4096, 0.5, np.float16)
    total = evaluate("ScatterND", np.zeros(1, np.float16), np.zeros((4096, 1), np.int64), ones, reduction="add")
    assert total.dtype == np.float16 and total[0] == 2048


def test_tensor_scatter_wraps_only_in_circular_mode():
    past, update = np.zeros((2, 4, 1), np.int64), numbered((2, 2, 1)) + 1
    linear = evaluate("TensorScatter", past, update, ints(0, 2))
    assert linear[..., 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]]
    circular = evaluate("TensorScatter", past, update, ints(3, 5), mode="circular")
    assert circular[..., 0].tolist() == [[2, 0, 0, 1], [0, 3, 4, 0]]
    with pytest.raises(InvalidValue, match=r"TensorScatter: 2 entries from .* do not fit"):
        evaluate("TensorScatter", past, update, ints(0, 3))


@law(hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=4), elements=st.integers(-6, 6)), st.data())
def test_one_hot_marks_one_class_or_none(indices, data):
    depth = 4
    axis = data.draw(st.integers(-indices.ndim - 1, indices.ndim))
    hot = evaluate("OneHot", indices, np.array(depth), np.float32([0, 1]), axis=axis)
    inside = (indices >= -depth) & (indices < depth)
    np.testing.assert_array_equal(hot.sum(axis), inside)
    np.testing.assert_array_equal(np.argmax(hot, axis)[inside], (indices % depth)[inside])
    first = evaluate("OneHot", indices, np.array(depth), np.float32([0, 1]), axis=axis, version=9)
    np.testing.assert_array_equal(first.sum(axis), inside & (indices >= 0))


@law(hnp.arrays(np.int8, SHAPES, elements=st.integers(0, 1)))
def test_non_zero_finds_them_all(x):
    found = evaluate("NonZero", x)
    assert found.dtype == np.int64 and found.shape == (x.ndim, np.count_nonzero(x))
    assert [tuple(c) for c in found.T] == [i for i in itertools.product(*map(range, x.shape)) if x[i]]


def test_non_zero_of_scalars_has_no_coordinates():
    assert evaluate("NonZero", np.array(3)).shape == (0, 1)
    assert evaluate("NonZero", np.array(0)).shape == (0, 0)


@law(
    hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=4), elements=st.integers(0, 2)),
    st.sampled_from([None, 0, 1, -1]),
    st.booleans(),
)
def test_unique_can_be_put_together_again(x, axis, in_order):
    attrs = {} if axis is None else {"axis": axis}
    y, first, inverse, counts = evaluate("Unique", x, sorted=int(in_order), outputs=4, **attrs)
    source, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    np.testing.assert_array_equal(np.take(y, inverse, axis=along), source)
    np.testing.assert_array_equal(np.take(source, first, axis=along), y)
    np.testing.assert_array_equal(np.bincount(inverse, minlength=y.shape[along]), counts)
    slices = [s.tolist() for s in np.moveaxis(y, along, 0)]
    assert (slices == sorted(slices)) if in_order else (first.tolist() == sorted(first.tolist()))


def test_compress_may_be_given_too_few_conditions():
    x = numbered((2, 3))
    assert evaluate("Compress", x, np.array([False, True])).tolist() == [1]
    assert evaluate("Compress", x, np.array([False, True]), axis=1).tolist() == [[1], [4]]


# -- creating -------------------------------------------------------------------------------------------------------


@law(st.integers(-20, 20), st.integers(-20, 20), st.integers(-5, 5).filter(bool))
def test_range_agrees_with_python(start, limit, delta):
    expected = list(range(start, limit, delta))
    for dtype in (np.int32, np.int64, np.float32, np.float64, ml_dtypes.bfloat16):
        result = evaluate("Range", *(np.array(v).astype(dtype) for v in (start, limit, delta)))
        assert result.dtype == dtype and result.astype(np.float64).tolist() == expected


def test_constants_of_every_kind():
    cases = [
        ({"value": numbered((2, 2))}, numbered((2, 2))),
        ({"sparse_value": numbered((3,))}, numbered((3,))),
        ({"value_int": 3}, np.array(3)),
        ({"value_ints": (3, 4)}, np.array([3, 4])),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_floats": (0.5, 1.0)}, np.array([0.5, 1], np.float32)),
        ({"value_string": "é"}, np.array("é", object)),
        ({"value_strings": ("a", b"b")}, np.array(["a", "b"], object)),
    ]
    for attrs, expected in cases:
        result = evaluate("Constant", **attrs)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(result, expected)
    with pytest.raises(InvalidValue, match="Constant: exactly one"):
        evaluate("Constant", value_int=1, value_float=1.0)


def test_shapes_fills_and_diagonals():
    x = np.zeros((2, 3, 4), np.float32)
    assert evaluate("Shape", x).tolist() == [2, 3, 4]
    assert evaluate("Shape", x, start=-2, end=100).tolist() == [3, 4]
    assert evaluate("Size", x) == 24 and evaluate("Size", x).dtype == np.int64
    filled = evaluate("ConstantOfShape", ints(2, 2), value=np.array([7], np.int8))
    assert filled.dtype == np.int8 and filled.tolist() == [[7, 7], [7, 7]]
    assert evaluate("ConstantOfShape", ints()).shape == ()
    eye = evaluate("EyeLike", x[0], k=1, dtype=DType.int32.onnx)
    assert eye.dtype == np.int32
    np.testing.assert_array_equal(eye, np.eye(3, 4, 1))


# -- bad operands ---------------------------------------------------------------------------------------------------

X = numbered((2, 4))


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "error", "message"),
    [
        ("Gather", [X, ints(7)], {"axis": 1}, InvalidValue, "Gather: index 7 is out of range for axis 1 of size 4"),
        ("Gather", [X, np.array([0.5])], {}, DTypeMismatch, "Gather: indices must be integers"),
        ("GatherElements", [X, np.array([[-5]])], {"axis": 1}, InvalidValue, "index -5 is out of range for axis 1"),
        ("GatherElements", [X, ints(0)], {}, ShapeMismatch, "GatherElements: data has rank 2"),
        ("GatherND", [X, np.array([[0, 4]])], {}, InvalidValue, "GatherND: index 4 is out of range for axis 1"),
        ("ScatterND", [X, np.array([[2]]), X[:1]], {}, InvalidValue, "ScatterND: index 2 is out of range for axis 0"),
        ("ScatterND", [X, np.array([[1]]), X], {}, ShapeMismatch, r"ScatterND: updates of shape \[1, 4\] expected"),
        ("ScatterElements", [X, X, X], {"reduction": "mean"}, InvalidValue, "ScatterElements: "),
        ("Reshape", [X, ints(3, -1)], {}, ShapeMismatch, "Reshape: 8 elements"),
        ("Reshape", [X, ints(-1, -1)], {}, InvalidValue, "Reshape: .* is not a shape"),
        ("Squeeze", [X, ints(0)], {}, ShapeMismatch, "Squeeze: axis 0"),
        ("Unsqueeze", [X, ints(0, 0)], {}, InvalidValue, "Unsqueeze: an axis is repeated"),
        ("Transpose", [X], {"perm": (0, 0)}, InvalidValue, "Transpose: .* is not a permutation"),
        ("Concat", [X, X[:, :1]], {"axis": 0}, ShapeMismatch, "Concat: shapes"),
        ("Split", [X, ints(1, 2)], {"axis": 1}, InvalidValue, "Split: sizes"),
        ("Slice", [X, ints(0), ints(1), ints(0), ints(0)], {}, InvalidValue, "Slice: a step must not be 0"),
        ("Slice", [X, ints(0), ints(1, 2)], {}, ShapeMismatch, "Slice: starts, ends"),
        ("Pad", [X, ints(0, 0, 1)], {}, ShapeMismatch, "Pad: 4 amounts"),
        ("Pad", [X, ints(-2, 0, -2, 0)], {}, InvalidValue, "Pad: .* cuts off more"),
        ("Pad", [X[:0], ints(1, 0, 0, 0)], {"mode": "edge"}, InvalidValue, "Pad: mode 'edge' has nothing to repeat"),
        ("Pad", [X, ints(0, 0, 0, 0)], {"mode": "mirror"}, InvalidValue, "Pad: mode must be"),
        ("Tile", [X, ints(1, -1)], {}, InvalidValue, "Tile: negative size"),
        ("Expand", [X, ints(3)], {}, ShapeMismatch, "Expand: shapes"),
        ("ConstantOfShape", [ints(-1)], {}, InvalidValue, "ConstantOfShape: negative size"),
        ("Range", [np.array(0), np.array(3), np.array(0)], {}, InvalidValue, "Range: delta must not be 0"),
        ("Range", [np.array(0.0), np.array(np.nan), np.array(1.0)], {}, InvalidValue, "Range: .* has no end"),
        ("OneHot", [ints(1), np.array(np.nan), ints(0, 1)], {}, InvalidValue, "OneHot: depth must be a number"),
        ("Compress", [X, np.ones(5, bool)], {"axis": 1}, ShapeMismatch, "Compress: at most 4 conditions"),
        ("ReverseSequence", [X, ints(9, 0, 0, 0)], {}, InvalidValue, "ReverseSequence: lengths"),
        ("DepthToSpace", [numbered((1, 3, 1, 1))], {"blocksize": 2}, ShapeMismatch, "DepthToSpace: 3 channels"),
        ("Trilu", [ints(1)], {}, ShapeMismatch, "Trilu: rank 2"),
        ("EyeLike", [ints(1)], {}, ShapeMismatch, "EyeLike: a matrix"),
    ],
)
def test_bad_operands_are_named(name, operands, attrs, error, message):
    outputs = 2 if name == "Split" else 1
    with pytest.raises(error, match=message):
        evaluate(name, *operands, outputs=outputs, **attrs)


@pytest.mark.parametrize(
    ("name", "operands", "attrs"),
    [
        ("ConstantOfShape", [ints(1 << 40)], {}),
        ("Expand", [X, ints(1 << 30, 1, 1)], {}),
        ("Tile", [X, ints(1 << 30, 1)], {}),
        ("Pad", [X, ints(1 << 40, 0, 0, 0)], {}),
        ("Range", [np.array(0), np.array(1 << 40), np.array(1)], {}),
        ("OneHot", [ints(1), np.array(1 << 40), ints(0, 1)], {}),
        ("CenterCropPad", [X, ints(1 << 40, 1)], {}),
    ],
)
def test_sizes_from_data_are_bounded(name, operands, attrs):
    with tensor_limit(1 << 20), pytest.raises(ResourceLimit, match=name):
        evaluate(name, *operands, **attrs)
