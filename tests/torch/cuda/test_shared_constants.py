"""Constants of graphs that are alive at the same time: on the device once, and nobody else's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet, ref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import nn  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.errors import InvalidValue  # noqa: E402
from ranvier.graph.ir import Graph  # noqa: E402
from ranvier.graph.tensors import ConstTensor  # noqa: E402
from ranvier.graph.types import TensorType  # noqa: E402
from ranvier.providers.cuda import constants, merging  # noqa: E402
from ranvier.providers.cuda.decode import Decoding  # noqa: E402
from ranvier.providers.cuda.kernel import CudaKernel  # noqa: E402
from ranvier.providers.cuda.library import installed  # noqa: E402
from ranvier.providers.cuda.options import CudaOptions  # noqa: E402
from ranvier.providers.cuda.place import make_place  # noqa: E402
from ranvier.quantize import Integers, Quantized  # noqa: E402
from ranvier.tensor.nn.modules import coded  # noqa: E402
from ranvier.tensor.state import Constant  # noqa: E402
from tests.tensor.nn import test_experts as experts  # noqa: E402
from tests.tensor.nn.test_read_again import in_memory  # noqa: E402
from tests.torch.cuda.models import load  # noqa: E402
from tests.torch.device import DEVICE  # noqa: E402

Array = np.ndarray[Any, Any]
INPUTS, OUTPUTS = 96, 128
CODES = (OUTPUTS, INPUTS // 32, 16)  # the shape of those of 4 bits
needs_triton = pytest.mark.skipif(not installed("triton"), reason="there are no kernels without Triton")


def numbers(*shape: int) -> Array:
    return np.random.default_rng(6).standard_normal(shape).astype(np.float32)


def codes(bits: int = 4, seed: int = 5) -> Quantized:
    drawn = np.random.default_rng(seed).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    return Integers(bits, False, "group", 32, signed=False).quantize(drawn)


def compiled(layer: Any, factor: float = 1.0) -> Any:
    return rv.jit(lambda *x: layer(*x) * factor)


def product(run: Any, rows: int) -> Array:
    found: Array = run(rv.Tensor(numbers(rows, INPUTS))).numpy()
    return found


def close(found: Array, weight: Quantized, rows: int) -> None:
    np.testing.assert_allclose(found, numbers(rows, INPUTS) @ weight.dequantize().T, rtol=2e-3, atol=2e-3)


def in_use() -> int:
    gc.collect()
    return len(constants._IN_USE)


class Seen:
    """Graphs that were compiled and are still there, and arrays that were brought to the device for them."""

    def __init__(self) -> None:
        self.kernels: WeakSet[CudaKernel] = WeakSet()
        self.uploads: list[tuple[int, ...]] = []

    def tensors(self, dtype: Any = torch.uint8) -> list[dict[int, Any]]:
        """Constants of each graph by address."""
        gc.collect()
        held = [[t for t in kernel._all_constants() if t.dtype == dtype] for kernel in self.kernels]
        return [{t.data_ptr(): t for t in each} for each in held]


@pytest.fixture
def seen() -> Iterator[Seen]:
    found = Seen()
    whole, over = CudaKernel._load, constants.tensor_over

    def loaded(self: Any, *given: Any) -> None:
        found.kernels.add(self)
        whole(self, *given)

    def upload(array: Array) -> Any:
        found.uploads.append(array.shape)
        return over(array).clone()  # a twin's tensors lie over arrays

    with mock.patch.object(CudaKernel, "_load", loaded), mock.patch.object(constants, "tensor_over", upload):
        yield found


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything is computed on the device; the file says how."""
    device = f'"{DEVICE}"' if DEVICE == "cpu" else DEVICE
    path = tmp_path / "ranvier.toml"
    path.write_text(f"[provider_options.cuda]\ndevice = {device}\ntriton = false\n")
    monkeypatch.setenv("RANVIER_CONFIG", str(path))
    with rv.backend("cuda"):
        yield path


# -- graphs of one module ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_graphs_of_one_layer_have_its_codes_once(
    there: Path, seen: Seen, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded, "_LEAST", 1024)
    weight, read = codes(), []
    layer = nn.QuantizedLinear((lambda: [read.append(1), codes()][1]) if again else weight)
    on_host = in_memory(layer) if again else None
    run, other = compiled(layer), compiled(layer, 2.0)
    for rows in (1, 24):
        close(product(run, rows), weight, rows)
    close(product(other, 24) / 2, weight, 24)
    gc.collect()
    assert on_host is None or (on_host() is None and len(read) == 1)  # let go of, and not read again
    first, second, third = seen.tensors()
    assert first and list(first) == list(second) == list(third)
    assert len(seen.uploads) == len(set(seen.uploads))


def test_the_last_graph_takes_them_with_it(there: Path, seen: Seen) -> None:
    layer, before = nn.QuantizedLinear(codes()), in_use()
    one, two = compiled(layer), compiled(layer, 2.0)
    for run in (one, two):
        product(run, 1)
    held = [ref(tensor) for tensor in seen.tensors()[0].values()]
    assert seen.uploads.count(CODES) == 1
    del one, run
    close(product(two, 1) / 2, codes(), 1)
    assert len(seen.tensors()) == 1 and all(each() is not None for each in held)
    del two
    assert not seen.tensors() and not any(each() is not None for each in held)
    assert in_use() == before
    close(product(compiled(layer), 1), codes(), 1)
    assert seen.uploads.count(CODES) == 2


def test_equal_numbers_of_another_layer_are_its_own(there: Path, seen: Seen) -> None:
    runs = [compiled(nn.QuantizedLinear(codes(seed=seed))) for seed in (5, 5, 8)]
    for run, seed in zip(runs, (5, 5, 8)):
        close(product(run, 1), codes(seed=seed), 1)
    held = seen.tensors()
    assert len({address for each in held for address in each}) == sum(map(len, held)) > 3


def test_experts_in_a_form_of_their_own(there: Path, seen: Seen) -> None:
    """Codes of 5 bits are not brought there again where they are in bits that kernels read."""
    make = experts.KINDS["5 bits"]
    up, down = make(experts.INNER, experts.FEATURES), make(experts.FEATURES, experts.INNER)
    layer = nn.QuantizedExperts(up, down, top_k=experts.CHOSEN, activation="relu")
    run, made, counts = compiled(layer), [], []
    for tokens in (1, 40):
        x, router = numbers(tokens, experts.FEATURES), numbers(tokens, experts.EXPERTS)
        made.append(run(rv.Tensor(x), rv.Tensor(router)).numpy())
        counts.append(len(seen.uploads))
    np.testing.assert_allclose(made[0][0], made[1][0], rtol=1e-3, atol=1e-3)
    first, second = seen.tensors()
    assert len(first) > 1 and list(first) == list(second)
    assert counts[0] == counts[1] > 3


@needs_triton
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_the_order_of_kernels(there: Path, seen: Seen, bits: int) -> None:
    """Also numbers that were made of codes: what one graph has put away the other finds."""
    from ranvier.providers.cuda import decode_weights
    from ranvier.providers.cuda.kernels import choose
    from ranvier.providers.cuda.kernels.jit import Tile

    there.write_text(there.read_text().replace("false", "true"))
    weight, whole, kept = codes(bits), decode_weights.Shelf._shared, []
    layer = nn.QuantizedLinear(weight)

    def noted(self: Any, *given: Any) -> Any:
        kept.append(whole(self, *given))
        return kept[-1]

    with (
        mock.patch.object(decode_weights.Shelf, "_shared", noted),
        mock.patch.object(choose, "gemv_tile", lambda *_: Tile(16, 256, 1)),
    ):
        run = compiled(layer)
        for rows in (1, 24):
            for _ in range(2):
                close(product(run, rows), weight, rows)
        assert len(kept) == 2 and kept[0] is kept[1]
        found = ref(kept[0])
        del run
        kept.clear()
        gc.collect()
        assert found() is None


def test_a_constant_that_gets_another_value(there: Path, seen: Seen) -> None:
    held = Constant(np.arange(3.0, dtype=np.float32))
    one, two = rv.jit(lambda x: held + x), rv.jit(lambda x: held - x)
    x = rv.Tensor(np.ones(3, np.float32))
    assert one(x).tolist() == [1, 2, 3] and two(x).tolist() == [-1, 0, 1]
    held.assign(np.array([5.0, 6.0, 7.0], np.float32))
    assert one(x).tolist() == [6, 7, 8] and two(x).tolist() == [4, 5, 6]


# -- graphs of sessions -----------------------------------------------------------------------------------------------


def graph_of(const: ConstTensor, *, gathers: bool = False) -> Graph:
    """A constant as a result, its sum with an input, and rows of it by indices that may be wrong."""
    graph = Graph("sums", opsets={"": 21})
    kind = TensorType(DType.float32, (4,))
    x, weight = graph.add_input("x", kind), graph.add_constant(const, "w")
    results = [
        graph.add("Add", [x, weight], version=14, name="sum").output,
        graph.add("Identity", [weight], version=21, name="same").output,
    ]
    if gathers:
        at = graph.add_input("at", TensorType(DType.int64, (4,)))
        results.append(graph.add("Gather", [weight, at], {"axis": 0}, version=13, name="rows").output)
    for name, result in zip(("sum", "same", "rows"), results):
        result.name, result.type = name, kind
    graph.outputs = results
    return graph


def fixed(*values: float) -> Array:
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


X = np.ones(4, np.float32)


def test_memory_that_somebody_can_write_to_is_read_by_each_graph(seen: Seen) -> None:
    own = np.arange(4, dtype=np.float32)
    const, before = ConstTensor.of(own), in_use()
    with load(graph_of(const)) as one:
        assert one.run({"x": X})["sum"].tolist() == [1, 2, 3, 4]
        own[:] = 10
        with load(graph_of(const)) as two:
            assert two.run({"x": X})["sum"].tolist() == [11] * 4
            assert one.run({"x": X})["sum"].tolist() == [1, 2, 3, 4]
    assert len(seen.uploads) == 2 and in_use() == before


@pytest.mark.parametrize(
    "array, lasts",
    [
        (fixed(0, 1, 2, 3), True),
        (fixed(0, 1, 2, 3)[:], True),
        (np.frombuffer(fixed(0, 1, 2, 3).tobytes(), np.float32), True),
        (np.frombuffer(memoryview(bytearray(16)).toreadonly(), np.float32), False),
        (np.broadcast_to(np.zeros((), np.float32), (4,)), False),
        (np.arange(4.0, dtype=np.float32), False),
    ],
)
def test_which_memory_lasts(array: Array, lasts: bool, seen: Seen) -> None:
    const = ConstTensor.of(array)
    with load(graph_of(const)) as one, load(graph_of(const)) as two:
        for session in (one, two):
            np.testing.assert_array_equal(session.run({"x": X})["sum"], array + X)
    assert len(seen.uploads) == (1 if lasts else 2)


def test_results_are_the_callers_and_what_is_wrong_with_them_too(seen: Seen) -> None:
    """Both graphs give the constant itself back; one of them with a condition that does not hold."""
    const, bad = ConstTensor.of(fixed(0, 1, 2, 3)), np.array([0, 1, 2, 4])
    with load(graph_of(const, gathers=True)) as one, load(graph_of(const)) as two:
        with pytest.raises(InvalidValue):
            one.run({"x": X, "at": bad})
        found = two.run({"x": X})["same"]
        assert found.tolist() == [0, 1, 2, 3]
        found[:] = 9
        for session, more in ((one, {"at": np.arange(4)}), (two, {})):
            assert session.run({"x": X, **more})["same"].tolist() == [0, 1, 2, 3]
        assert [list(each) for each in seen.tensors(torch.float32)] == [list(seen.tensors(torch.float32)[0])] * 2
    assert len(seen.uploads) == 1


def products(*arrays: Array) -> Graph:
    """Of one input with several matrices."""
    graph = Graph("products", opsets={"": 21})
    x = graph.add_input("x", TensorType(DType.float16, (4, 16)))
    for k, array in enumerate(arrays):
        weight = graph.add_constant(ConstTensor.of(array), f"w{k}")
        y = graph.add("MatMul", [x, weight], version=13, name=f"product {k}").output
        y.name, y.type = f"y{k}", TensorType(DType.float16, (4, array.shape[1]))
        graph.outputs = [*graph.outputs, y]
    return graph


def halves(seed: int, columns: int) -> Array:
    found = np.random.default_rng(seed).standard_normal((16, columns)).astype(np.float16)
    found.flags.writeable = False
    return found


@needs_triton
def test_matrices_side_by_side(seen: Seen) -> None:
    """Another order of them is another matrix."""
    own, other = halves(1, 16), halves(2, 32)
    x, whole, kept = numbers(4, 16).astype(np.float16), merging.Shelf.joined, []

    def noted(self: Any, *given: Any) -> Any:
        kept.append(whole(self, *given))
        return kept[-1]

    with mock.patch.object(merging.Shelf, "joined", noted):
        graphs = [products(own, other), products(own, other), products(other, own)]
        sessions = [load(graph, triton=True) for graph in graphs]
        for session, weights in zip(sessions, ((own, other), (own, other), (other, own))):
            for _ in range(2):
                for found, weight in zip(session.run({"x": x}).values(), weights):
                    np.testing.assert_allclose(found, x @ weight, rtol=1e-2, atol=1e-2)
    first, second, turned = (tensor.data_ptr() for _, tensor in kept)
    assert first == second != turned
    assert len(seen.uploads) == 2
    for session in sessions:
        session.close()


def test_weights_in_the_order_of_their_outputs(seen: Seen) -> None:
    """They are not brought there as they were where another graph has them so."""
    place, array, made = make_place(CudaOptions(device=DEVICE).device), halves(1, 32), []
    for _ in range(2):
        graph = products(array)
        attends = graph.add("GroupQueryAttention", [], domain="com.microsoft", version=1)
        with place.computing():
            made.append(constants.Constants(place, graph.constants.values()))
            Decoding(place, lambda steps, *_: steps, [attends]).lay_out(made[-1])
    (one,), (two,) = (each.tensors.values() for each in made)
    assert one.mT.is_contiguous() and one.data_ptr() == two.data_ptr()
    np.testing.assert_array_equal(one.cpu().numpy(), array)
    assert len(seen.uploads) == 1
