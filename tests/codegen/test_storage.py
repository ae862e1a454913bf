"""Strided views against NumPy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.storage import (
    Storage,
    View,
    aligned_copy,
    dense_strides,
    ordered_strides,
    reshaped_strides,
    row_major,
)
from ranvier.dtypes import DType


def factorings(total: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with so many elements."""

    def split(sizes: list[int]) -> tuple[int, ...]:
        rest, shape = total, []
        for size in sizes:
            step = int(np.gcd(size, rest))
            shape.append(step)
            rest //= step
        return (*shape, rest)

    return st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4).map(split)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([1, 6, 12, 24, 36]))
def test_a_reshape_is_a_view_exactly_where_numpy_needs_no_copy(data: st.DataObject, total: int) -> None:
    shape = data.draw(factorings(total))
    perm = data.draw(st.permutations(range(len(shape))))
    target = data.draw(factorings(total))
    array = np.arange(total, dtype=np.int8).reshape(shape).transpose(perm)
    found = reshaped_strides(array.shape, array.strides, target)
    wanted = array.reshape(target)
    if np.shares_memory(wanted, array):
        assert found is not None
    if found is not None:
        base = array.base if array.base is not None else array
        seen = np.lib.stride_tricks.as_strided(np.asarray(base).reshape(-1), target, found)
        np.testing.assert_array_equal(seen, wanted)


def test_orders_of_axes() -> None:
    assert dense_strides((2, 3, 4)) == (12, 4, 1)
    assert ordered_strides((2, 3, 4, 5), (0, 2, 3, 1)) == (60, 1, 15, 3)
    view = View.temporary(DType.float32, (2, 3, 4, 5), (0, 2, 3, 1))
    assert view.transposed((0, 2, 3, 1)).is_dense
    assert not view.is_dense
    assert view.nbytes == view.storage.nbytes == 480


def test_broadcasting_is_a_stride_of_zero() -> None:
    view = View.dense(Storage.temporary(12), DType.float32, (3, 1))
    assert view.expanded((2, 3, 5)).strides == (0, 1, 0)


def test_packed_constants_start_at_a_cache_line() -> None:
    shifted = np.zeros(101, np.uint8)[1:]
    assert aligned_copy(shifted).ctypes.data % 64 == 0
    packed = Storage.packed(shifted)
    assert packed.array is not None
    assert packed.array.ctypes.data % 64 == 0


def test_row_major_copies_only_what_lies_otherwise() -> None:
    scalar = np.array(3.0, np.float32)
    assert row_major(scalar) is scalar  # not an axis more
    assert row_major(2.5).shape == ()
    dense = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    dense.flags.writeable = False
    assert row_major(dense, aligned=True) is dense  # known by its identity, also where nobody may write to it
    for strided in (dense.T, dense[:, ::2], dense[::-1], np.broadcast_to(dense[0, 0], (3, 4))):
        made = row_major(strided)
        assert made.flags.c_contiguous
        np.testing.assert_array_equal(made, strided)


def test_row_major_moves_elements_to_their_alignment_only_when_asked() -> None:
    shifted = np.frombuffer(bytes(range(17)), np.int32, offset=1)
    assert not shifted.flags.aligned
    assert row_major(shifted) is shifted
    made = row_major(shifted, aligned=True)
    assert made.flags.aligned
    np.testing.assert_array_equal(made, shifted)


def test_constants_keep_their_shape() -> None:
    for array in (np.array(1.5, np.float32), np.ones((0, 3), np.float32), np.ones((2, 3), np.float32).T):
        view = View.constant(array, DType.float32)
        assert view.shape == array.shape
        assert view.is_dense
        assert view.storage.array is not None
        np.testing.assert_array_equal(view.storage.array, array)
