"""One launch for many tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from ranvier.codegen.loops.ir import Nest, Op
from ranvier.codegen.storage import View
from ranvier.codegen.triton.library import Call, kernel
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


def test_what_is_alike() -> None:
    factor = View.temporary(F32, (1,))
    one, other, vectors = (kernel(_scaled(size, factor)[0]).calls[0].source for size in (5, 900, 512))
    assert likeness(one) is not None and likeness(one) == likeness(other) != likeness(vectors)
    rows = kernel(reduction(View.temporary(F32, (8, 1)), View.temporary(F32, (8, 40)), [1], "sum"))
    assert all(likeness(call.source) is None for call in rows.calls)
    assert room([one, other]) and not room([one, other] * 30)
