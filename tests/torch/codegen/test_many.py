"""One launch for many tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from ranvier.codegen.loops.ir import Nest, Op
from ranvier.codegen.storage import View
from ranvier.codegen.triton.library import Call, Printed, kernel
from ranvier.codegen.triton.many import likeness, merged, room
from ranvier.dtypes import DType
from tests.codegen.nest_makers import elementwise, reduction
from tests.torch.codegen.checking import DEVICE

F32 = DType.float32


def _scaled(size: int, by: View) -> tuple[Nest, View, View]:
    x, y = View.temporary(F32, (size,)), View.temporary(F32, (size,))
    return elementwise(y, [x, by], lambda a, b: Op("mul", (a, b), F32)), x, y


@pytest.mark.parametrize("sizes", [(5, 1025, 3), (16, 2048, 1024, 32), (7, 7)])
def test_every_tensor_gets_its_own(sizes: tuple[int, ...]) -> None:
    factor = View.temporary(F32, (1,))
    made = [_scaled(size, factor) for size in sizes]
    sources = [kernel(nest).calls[0].source for nest, _, _ in made]
    whole = merged(sources)
    assert len(whole.pointers) == 1 + 2 * len(sizes)  # the factor is the same for all
    memory: dict[Any, Any] = {factor.storage: torch.full((1,), 3.0, device=DEVICE)}
    for k, (size, (_, x, y)) in enumerate(zip(sizes, made)):
        memory[x.storage] = torch.arange(size, dtype=torch.float32, device=DEVICE) + 10 * k
        memory[y.storage] = torch.full((size + 4,), -1.0, device=DEVICE)
    Call(whole).launch(memory)
    for size, (_, x, y) in zip(sizes, made):
        found = memory[y.storage]
        assert torch.equal(found[:size], memory[x.storage] * 3) and bool((found[size:] == -1).all())


def test_results_may_lie_over_operands() -> None:
    factor = View.temporary(F32, (1,))
    made = [_scaled(size, factor) for size in (6, 2000)]
    memory: dict[Any, Any] = {factor.storage: torch.full((1,), 2.0, device=DEVICE)}
    tensors = [torch.ones(size, device=DEVICE) for size in (6, 2000)]
    for tensor, (_, x, y) in zip(tensors, made):
        memory[x.storage] = memory[y.storage] = tensor
    Call(merged([kernel(nest).calls[0].source for nest, _, _ in made])).launch(memory)
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def _summed(rows: int, columns: int, axis: int = 1) -> tuple[Printed, View, View]:
    x = View.temporary(F32, (rows, columns))
    y = View.temporary(F32, (rows, 1) if axis else (1, columns))
    return kernel(reduction(y, x, [axis], "sum")), x, y


@pytest.mark.parametrize("shape", [(1024, 64), (6, 40)])
def test_sums_of_one_size_are_one_launch(shape: tuple[int, int]) -> None:
    made = [_summed(*shape, axis=0) for _ in range(3)]
    calls = [merged(list(each)) for each in zip(*([call.source for call in printed.calls] for printed, _, _ in made))]
    assert len(calls) == (2 if shape[0] == 1024 else 1)  # high columns are summed in parts first
    memory: dict[Any, Any] = {}
    for k, (printed, x, y) in enumerate(made):
        memory[x.storage] = torch.arange(shape[0] * shape[1], dtype=torch.float32, device=DEVICE) % 7 + k
        memory[y.storage] = torch.full((shape[1] + 4,), -1.0, device=DEVICE)
        for storage in printed.temporaries:
            memory[storage] = torch.full((storage.nbytes,), 0x7E, dtype=torch.uint8, device=DEVICE)
    for call in calls:
        Call(call).launch(memory)
    for _, x, y in made:
        found = memory[y.storage]
        assert torch.equal(found[: shape[1]], memory[x.storage].reshape(shape).sum(dim=0))
        assert bool((found[shape[1] :] == -1).all())


def test_what_is_alike() -> None:
    factor = View.temporary(F32, (1,))
    one, other, vectors = (kernel(_scaled(size, factor)[0]).calls[0].source for size in (5, 900, 512))
    assert likeness(one) is not None and likeness(one) == likeness(other) != likeness(vectors)
    high, same, low = (_summed(8, width)[0].calls[0].source for width in (40, 40, 24))
    assert likeness(high) == likeness(same) != likeness(low) and likeness(high) != likeness(one)
    assert likeness(merged([high, same])) is None
    assert room([one, other]) and not room([one, other] * 30)
