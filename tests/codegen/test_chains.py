"""Two nests as one: the same results as one after the other, with less in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.loops.chain import chained, depends, only_folds
from ranvier.codegen.loops.ir import Final, Load, Map, Nest, Op, Operand, Reduce, Result
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen.nest_makers import copy, elementwise, reduction
from tests.codegen.nest_oracle import Oracle

Array = np.ndarray[Any, Any]
F32 = DType.float32
SHAPE = (3, 4, 5)


def _tensor(*shape: int) -> View:
    return View.temporary(F32, shape)


def _memory(*views: View) -> dict[Storage, Array]:
    draw = np.random.default_rng(len(views))
    found = {v.storage: draw.normal(size=v.storage.nbytes // 4).astype(np.float32) for v in views}
    return {storage: array.view(np.uint8) for storage, array in found.items()}


def _agree(nests: list[Nest], whole: Nest, memory: dict[Storage, Array], results: list[View]) -> None:
    wanted = {storage: array.copy() for storage, array in memory.items()}
    found = {storage: array.copy() for storage, array in memory.items()}
    for nest in nests:
        Oracle(nest, wanted).run()
    Oracle(whole, found).run()
    for view in results:
        a, b = (each[view.storage].view(np.float32) for each in (found, wanted))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _mul(*args: Any) -> Op:
    return Op("mul", args, F32)


def _centred(x: View, mean: View, y: View) -> Nest:
    return elementwise(y, [x, mean], lambda a, b: Op("sub", (a, b), F32))


def test_a_sum_and_what_is_made_of_it_are_one() -> None:
    x, total, y = _tensor(*SHAPE), _tensor(3, 4, 1), _tensor(*SHAPE)
    first, second = reduction(total, x, [2], "sum"), _centred(x, total, y)
    whole = chained(first, second, ())
    assert whole is not None and whole.row == {2} and total.storage not in {o.view.storage for o in whole.operands}
    _agree([first, second], whole, _memory(x, total, y), [y])
    kept = chained(first, second, {total.storage})
    assert kept is not None
    _agree([first, second], kept, _memory(x, total, y), [y, total])


def test_work_once_per_row_goes_along() -> None:
    x, total, half, y = _tensor(*SHAPE), _tensor(3, 4, 1), _tensor(3, 4, 1), _tensor(*SHAPE)
    nests = [
        reduction(total, x, [2], "sum"),
        elementwise(half, [total], lambda a: _mul(a, a)),
        _centred(x, half, y),
        reduction(total2 := _tensor(3, 4, 1), y, [2], "max"),
    ]
    whole: Nest | None = nests[0]
    for nest in nests[1:]:
        assert whole is not None
        whole = chained(whole, nest, {half.storage, y.storage})
    assert whole is not None and [type(s) for s in whole.stages] == [Reduce, Reduce, Map, Final]
    _agree(nests, whole, _memory(x, total, half, y, total2), [half, y, total2])


def test_work_on_the_same_rows_needs_not_depend() -> None:
    x, a, b = _tensor(*SHAPE), _tensor(3, 1, 1), _tensor(3, 1, 1)
    first, second = reduction(a, x, [1, 2], "sum"), reduction(b, x, [1, 2], "max")
    whole = chained(first, second, {a.storage})
    assert whole is not None and only_folds(whole) and not depends(first, second) and len(whole.operands) == 3
    _agree([first, second], whole, _memory(x, a, b), [a, b])


@pytest.mark.parametrize("turned", [False, True])
def test_only_the_same_point_is_handed_on(turned: bool) -> None:
    x, y, z = _tensor(4, 4), _tensor(4, 4), _tensor(4, 4)
    first = elementwise(y, [x], lambda a: _mul(a, a))
    second = copy(z, y.transposed((1, 0)) if turned else y)
    whole = chained(first, second, ())
    assert (whole is None) == turned
    if whole is not None:
        _agree([first, second], whole, _memory(x, y, z), [z])


def test_other_rows_are_apart() -> None:
    x, a, b = _tensor(*SHAPE), _tensor(3, 4, 1), _tensor(3, 1, 5)
    assert chained(reduction(a, x, [2], "sum"), reduction(b, x, [1], "sum"), {a.storage}) is None


def test_what_is_read_is_not_written_over() -> None:
    x, y = _tensor(*SHAPE), _tensor(*SHAPE)
    assert chained(copy(y, x), copy(x, y), {y.storage}) is None
    scaled = Nest(SHAPE, (Operand(x, x.strides), Operand(x, x.strides)), (Map(((1, Load(0, F32)),)),))
    assert chained(scaled, copy(y, x), {x.storage}) is None  # reads what it writes itself


def test_folds_keep_their_numbers() -> None:
    """Of a nest that stores before its last fold."""
    x, a, y, b = _tensor(*SHAPE), _tensor(3, 4, 1), _tensor(*SHAPE), _tensor(3, 4, 1)
    strides = (*a.strides[:2], 0)
    operands = (Operand(x, x.strides), Operand(a, strides), Operand(b, strides))
    first = Nest(
        SHAPE,
        operands,
        (
            Reduce("sum", Load(0, F32), F32),
            Final(((1, Result(0, F32)),)),
            Reduce("max", Load(0, F32), F32),
            Final(((2, Result(2, F32)),)),
        ),
        frozenset({2}),
    )
    second = elementwise(y, [x, a, b], lambda e, f, g: Op("sub", (_mul(e, f), g), F32))
    whole = chained(first, second, {b.storage})
    assert whole is not None
    _agree([first, second], whole, _memory(x, a, b, y), [y, b])
