"""How kernels are found again, bound to memory, and tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from ranvier.codegen.loops.ir import Const, Nest, Op
from ranvier.codegen.loops.normalize import normalized
from ranvier.codegen.storage import View
from ranvier.codegen.triton import gemm, library, tune
from ranvier.codegen.triton.schedule import plan
from ranvier.dtypes import DType
from tests.codegen.nest_makers import copy, elementwise, reduction
from tests.torch.codegen.checking import DEVICE

F32 = DType.float32


def doubled(rows: int, columns: int) -> tuple[Nest, View, View]:
    a, out = View.temporary(F32, (rows, columns)), View.temporary(F32, (rows, columns))
    return elementwise(out, [a], lambda x: Op("mul", (x, Const(2.0, F32)), F32)), a, out


def test_equal_structures_share_a_function() -> None:
    first, second = (library.kernel(doubled(3, n)[0]).calls[0].source for n in (40, 57))
    assert first.text == second.text and first.numbers != second.numbers
    assert library.function(first.text, first.name) is library.function(second.text, second.name)


def test_bound_launches_see_what_is_in_memory_by_then() -> None:
    nest, a, out = doubled(4, 33)
    x, y = torch.ones(4, 33, device=DEVICE), torch.zeros(4, 33, device=DEVICE)
    run = library.kernel(nest).bound({a.storage: x, out.storage: y})
    run()
    assert bool((y == 2).all())
    x.fill_(5)
    run()
    assert bool((y == 10).all())


def test_tensors_may_lie_anywhere_in_an_arena() -> None:
    nest, a, out = doubled(2, 9)
    arena = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)
    arena[64 : 64 + 72].view(torch.float32).fill_(1.5)
    library.kernel(nest).launch({a.storage: arena[64:136], out.storage: arena[512:584]})
    assert bool((arena[512:584].view(torch.float32) == 3).all())
    assert int(arena[584:].sum()) == 0


def test_nothing_to_do_has_no_calls() -> None:
    made = library.kernel(copy(View.temporary(F32, (0, 4)), View.temporary(F32, (0, 4))))
    assert made.calls == () and made.source == ""
    made.launch({})
    made.bound({})()


def test_calls_name_what_they_write() -> None:
    nest, a, out = doubled(4, 8)
    call = library.kernel(nest).calls[0]
    assert call.storages == (a.storage, out.storage) and call.written == (out.storage,)


def test_later_launches_go_straight_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiled is handed addresses as numbers; addresses aligned otherwise are compiled for apart."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    class Compiled:
        function, packed_metadata = "entry", "packed"

        def run(self, *args: Any) -> None:
            seen.append(("driver", args))

    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> Compiled:
                seen.append(("triton", (grid, len(args), options["num_warps"])))
                return Compiled()

            return launch

    monkeypatch.setattr(library, "function", lambda text, name: Jitted())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    nest, a, out = doubled(2, 9)
    made = library.kernel(nest)
    source = made.calls[0].source
    x, y = torch.zeros(64), torch.zeros(64)
    for start in (0, 4, 1):
        made.launch({a.storage: x[start:], out.storage: y})
    rest = (*source.numbers, *(size for _, size in source.constants))
    first = ("triton", (source.grid, 2 + len(source.numbers), source.warps))
    again = ("driver", (*source.grid, 8, "entry", "packed", None, None, None, x[4:].data_ptr(), y.data_ptr(), *rest))
    assert x.data_ptr() % 16 == 0 and seen == [first, again, first]


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("RANVIER_CACHE", raising=False)
    monkeypatch.setattr(tune, "_device", "")
    monkeypatch.setattr(tune, "_table", None)


@pytest.mark.usefixtures("empty_store")
def test_what_was_measured_best_is_kept_for_the_device() -> None:
    nest, a, out = doubled(64, 1024)
    memory = {a.storage: torch.ones(64, 1024, device=DEVICE), out.storage: torch.zeros(64, 1024, device=DEVICE)}
    normal = normalized(nest)
    assert normal is not None
    default = plan(normal)
    times = iter([5.0, 4.0, 1.0, *[6.0] * 100])
    found = tune.tune(nest, memory, "a device", measure=lambda run: next(times))
    assert found == tune.candidates(default)[2] != default
    assert library.kernel(nest).calls[0].source.warps == default.warps  # not asked for yet
    assert tune.consult("another device") == 0
    assert tune.consult("a device") == 1
    source = library.kernel(nest).calls[0].source
    assert (dict(source.constants)["X"], source.warps) == (found.blocks[0], found.warps)
    near, _, _ = doubled(63, 1020)
    assert dict(library.kernel(near).calls[0].source.constants)["X"] == found.blocks[0]
    tune.consult("")


@pytest.mark.usefixtures("empty_store")
def test_defaults_stay_where_nothing_is_clearly_faster() -> None:
    nest, a, out = doubled(64, 1024)
    memory = {a.storage: torch.ones(64, 1024, device=DEVICE), out.storage: torch.zeros(64, 1024, device=DEVICE)}
    times = iter([1.0, 0.99, *[2.0] * 100])
    found = tune.tune(nest, memory, "a device", measure=lambda run: next(times))
    normal = normalized(nest)
    assert normal is not None and found == plan(normal)
    assert tune.consult("a device") == 0


def test_measuring_stops_in_time_and_survives_what_does_not_compile() -> None:
    def broken() -> tune.Run:
        raise RuntimeError("too large")

    def fine() -> tune.Run:
        return lambda: None

    some = [((k,), broken if k == 1 else fine) for k in range(4)]
    times = iter([4.0, 3.0, 1.0])
    fastest, seen = tune.best(some, measure=lambda run: next(times))
    assert (fastest, seen) == (3, [4.0, float("inf"), 3.0, 1.0])
    fastest, seen = tune.best(some, seconds=-1.0, measure=lambda run: 1.0)
    assert (fastest, len(seen)) == (0, 1)
    with pytest.raises(RuntimeError, match="too large"):
        tune.best([((0,), broken)], measure=lambda run: 1.0)


@pytest.mark.parametrize("axis", [0, 1])
def test_every_candidate_computes_the_same(axis: int) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (70, 90)).astype(np.float32)
    a, out = (
        View.temporary(F32, x.shape),
        View.temporary(F32, tuple(1 if k == axis else n for k, n in enumerate(x.shape))),
    )
    nest = normalized(reduction(out, a, [axis], "sum"))
    assert nest is not None
    some = tune.candidates(plan(nest))
    assert len(some) > 3
    source = torch.from_numpy(x).to(DEVICE)
    for each in some[:6]:
        got = torch.zeros(out.size, device=DEVICE)
        library.planned(nest, each).launch({a.storage: source, out.storage: got})
        np.testing.assert_array_equal(got.cpu().numpy(), x.sum(axis))


@pytest.mark.usefixtures("empty_store")
def test_products_use_the_tile_that_is_kept() -> None:
    a, b, out = (View.temporary(DType.float16, (1, 64, 64)) for _ in range(3))
    tune.keep("a device", gemm.key_of(a, b, out), (32, 64, 32, 4, 2, 1), [2.0, 1.0], 1)
    assert tune.consult("a device") == 1
    constants = dict(gemm.product(a, b, out).calls[0].source.constants)
    assert (constants["X"], constants["R"], constants["K"]) == (32, 64, 32)
    tune.consult("")
