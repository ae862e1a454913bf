"""Constants in files: read as they lie, aligned where asked for, given back and read again."""

from __future__ import annotations

import threading
from pathlib import Path
from weakref import ref

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.errors import WeightError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.tensors import ConstTensor, remade


def written(path: Path, pad: str, *, transposed: bool) -> np.ndarray:
    weights = np.random.default_rng(0).standard_normal((256, 192)).astype(np.float32)
    stored = weights.T.copy() if transposed else weights
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name=pad, transB=int(transposed))
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 192])],
        [numpy_helper.from_array(stored, "w")],
    )
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return weights


@pytest.mark.parametrize("pad", ["", "a", "ab", "abc"])  # one of these puts the weights where floats are aligned
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_any_alignment(tmp_path: Path, pad: str, transposed: bool) -> None:
    weights = written(tmp_path / "m.onnx", pad, transposed=transposed)
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    session = rv.load(tmp_path / "m.onnx")
    for _ in range(2):
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pad", ["", "a", "ab", "abc"])
def test_released_data_is_read_again(tmp_path: Path, pad: str) -> None:
    weights = written(tmp_path / "m.onnx", pad, transposed=False)
    tensor = onnx_format.read(str(tmp_path / "m.onnx")).constants["w"].const
    assert tensor is not None
    raw = tensor.raw()
    assert raw is tensor.raw() and not raw.flags.writeable
    tensor.release()
    np.testing.assert_array_equal(raw, weights)
    found = tensor.numpy()
    assert found.flags.aligned and found is tensor.numpy()
    tensor.release()
    np.testing.assert_array_equal(found, weights)


def test_memory_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    weights = written(tmp_path / "m.onnx", "", transposed=False)
    content = (tmp_path / "m.onnx").read_bytes()
    tensor = onnx_format.read(content).constants["w"].const
    assert tensor is not None
    tensor.release()
    np.testing.assert_array_equal(tensor.numpy(), weights)
    assert onnx.load_from_string(content).graph.initializer[0].name == "w"
    array = np.arange(100_000)
    own = ConstTensor.of(array)
    own.release()
    np.testing.assert_array_equal(own.numpy(), np.arange(100_000))


class Made:
    """Two arrays, made as often as they are asked for."""

    def __init__(self, first: int) -> None:
        self.first, self.times = first, 0

    def __call__(self) -> list[np.ndarray]:
        self.times += 1
        return [np.arange(self.first, self.first + 6), np.full(3, self.first, np.float32)]


def test_constants_are_made_again_when_they_are_wanted_after_they_were_released() -> None:
    make = Made(5)
    whole, part = remade(make(), make, "a test")
    assert (whole.shape, part.shape) == ((6,), (3,)) and "a test" in repr(whole)
    assert whole.numpy() is whole.raw() and not whole.numpy().flags.writeable
    held = part.numpy()
    for tensor in (whole, part):
        tensor.release()
    assert part.numpy() is held and make.times == 1  # somebody has it
    np.testing.assert_array_equal(whole.numpy(), np.arange(5, 11))
    assert make.times == 2 and part.numpy() is held
    del held
    np.testing.assert_array_equal(part.numpy(), [5, 5, 5])
    assert make.times == 2  # it was made with the other
    assert whole.origin is whole and part.origin is part


def test_of_constants_that_are_made_again_only_the_latest_stay() -> None:
    makers = [Made(1), Made(20)]
    tensors = [remade(make(), make, "a test") for make in makers]
    for tensor in (x for each in tensors for x in each):
        tensor.release()
    for _ in range(2):
        for (whole, part), make in zip(tensors, makers):
            before = make.times
            whole.numpy(), part.numpy()
            assert make.times == before + 1


def test_a_constant_that_is_made_otherwise_is_refused() -> None:
    (tensor,) = remade([np.zeros(3)], lambda: [np.zeros(4)], "a test")
    tensor.release()
    with pytest.raises(WeightError, match=r"a test: expected float64\[3\], got float64\[4\]"):
        tensor.numpy()


def test_as_many_are_made_as_there_were() -> None:
    arrays = [np.zeros(3), np.ones(2)]
    first, second = remade(arrays, lambda: arrays[:1], "a test")
    arrays = [np.zeros(3)]
    for tensor in (first, second):
        tensor.release()
    with pytest.raises(WeightError, match=r"a test: expected 2 tensors, got 1"):
        second.numpy()


def test_what_is_made_again_goes_with_its_constants() -> None:
    make = Made(7)
    tensors = remade(make(), make, "a test")
    for tensor in tensors:
        tensor.release()
    there = [ref(tensor.numpy()) for tensor in tensors]
    assert all(each() is not None for each in there)  # the latest
    del tensors, tensor
    assert all(each() is None for each in there)


def test_constants_wait_for_none_but_those_of_their_place() -> None:
    begun, others, waited = threading.Event(), threading.Event(), []

    def slowly() -> list[np.ndarray]:
        begun.set()
        waited.append(others.wait(10))
        return [np.arange(4)]

    (slow,), make = remade([np.arange(4)], slowly, "a test"), Made(1)
    quick = remade(make(), make, "a test")
    for tensor in (slow, *quick):
        tensor.release()
    thread = threading.Thread(target=slow.numpy)
    thread.start()
    begun.wait()
    for tensor in quick:
        tensor.numpy()
        tensor.release()
    others.set()
    thread.join()
    assert waited == [True]
