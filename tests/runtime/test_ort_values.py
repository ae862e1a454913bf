"""OrtValue and IOBinding: shared memory, results written in place, and clear refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import errors
from tests.runtime.ort_scripts import X
from tests.runtime.small_models import linear, model_of


@pytest.fixture
def model() -> bytes:
    return linear().SerializeToString()


def test_values_of_every_kind() -> None:
    text = rv.OrtValue.ortvalue_from_numpy(np.array(["a", "b"]))
    assert (text.data_type(), text.numpy().tolist()) == ("tensor(string)", ["a", "b"])
    made = rv.OrtValue.ortvalue_from_shape_and_type([2], TensorProto.BFLOAT16)
    assert (made.data_type(), made.element_type()) == ("tensor(bfloat16)", TensorProto.BFLOAT16)
    assert rv.from_dlpack(made).dtype == ml_dtypes.bfloat16
    typed = rv.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(3, np.uint16), TensorProto.BFLOAT16)
    assert typed.data_type() == "tensor(bfloat16)"
    assert rv.OrtValue([np.zeros(2)]).data_type() == "seq(tensor(double))"
    assert rv.OrtValue({1: 2.0}).data_type() == "map(int64,tensor(double))"
    empty = rv.OrtValue(None)
    assert not empty.has_value()
    transposed = rv.OrtValue.ortvalue_from_numpy(X.T)
    assert transposed.numpy().flags.c_contiguous
    flags = rv.OrtValue.from_dlpack(np.array([1, 0], np.uint8), is_bool_tensor=True)
    assert flags.data_type() == "tensor(bool)"
    assert "OrtValue float32[2, 3]" in repr(rv.OrtValue.ortvalue_from_numpy(X))


def test_values_that_cannot_be() -> None:
    sequence = rv.OrtValue([np.zeros(2)])
    for call in (sequence.numpy, sequence.shape, sequence.data_ptr, sequence.element_type):
        with pytest.raises(rv.InvalidArgument, match=r"holds no tensor but seq\(tensor\(double\)\)"):
            call()
    value = rv.OrtValue.ortvalue_from_numpy(X.copy())
    with pytest.raises(errors.ShapeMismatch, match=r"update_inplace: expected shape \[2, 3\], got \[2\]"):
        value.update_inplace(X[:, 0])
    with pytest.raises(errors.DTypeMismatch, match="expected float32, got float64"):
        value.update_inplace(X.astype(np.float64))
    frozen = X.copy()
    frozen.flags.writeable = False
    with pytest.raises(errors.InvalidInput, match="read-only"):
        rv.OrtValue.ortvalue_from_numpy(frozen).update_inplace(X)
    with pytest.raises(errors.NotSupported, match="device 'cuda:77': "):
        rv.OrtValue.ortvalue_from_numpy(X, "cuda", 77)
    with pytest.raises(errors.NotSupported, match="device 'npu': "):
        rv.OrtValue.ortvalue_from_numpy(X, "npu")
    with pytest.raises(errors.InvalidConfig, match="0 or more"):
        rv.OrtValue.ortvalue_from_numpy(X, "cuda", -1)
    with pytest.raises(errors.InvalidConfig, match=r"unknown device 'cpuu' .did you mean 'cpu'"):
        rv.OrtValue.ortvalue_from_numpy(X, "cpuu")
    with pytest.raises(errors.NotSupported, match="sparse"):
        rv.OrtValue.ort_value_from_sparse_tensor(None)
    with pytest.raises(errors.NotSupported, match="sparse"):
        value.as_sparse_tensor()
    with pytest.raises(errors.ShapeMismatch, match="sizes of 0 or more"):
        rv.OrtValue.ortvalue_from_shape_and_type([-1], np.float32)
    with pytest.raises(errors.DTypeMismatch, match="take 4 bytes"):
        rv.OrtValue.ortvalue_from_numpy_with_onnx_type(X, TensorProto.BFLOAT16)
    device = rv.OrtDevice.make("cpu", 0)
    assert (device.device_type(), device.device_id(), device.device_mem_type()) == (0, 0, 0)
    assert device.device_type() == rv.OrtDevice.cpu()
    device = rv.OrtDevice.make("cuda", 1)
    assert (device.device_type(), device.device_id()) == (rv.OrtDevice.cuda(), 1)


def test_sequences_as_values() -> None:
    model = model_of(
        [helper.make_node("SequenceEmpty", [], ["y"], dtype=TensorProto.INT64)],
        [],
        [helper.make_tensor_sequence_value_info("y", TensorProto.INT64, None)],
    )
    (value,) = rv.InferenceSession(model.SerializeToString()).run_with_ort_values(None, {})
    assert value.is_tensor_sequence()
    assert value.value == []
    assert value.data_type() == "seq(tensor(int64))"  # an empty list alone could not tell


def test_bindings_that_are_wrong(model: bytes) -> None:
    session = rv.InferenceSession(model)
    binding = session.io_binding()
    with pytest.raises(rv.InvalidArgument, match=r"no input 'xx' .did you mean 'x'"):
        binding.bind_cpu_input("xx", X)
    with pytest.raises(rv.InvalidArgument, match="no output 'z'"):
        binding.bind_output("z")
    with pytest.raises(rv.InvalidArgument, match="asks for no output"):
        session.run_with_iobinding(binding)
    with pytest.raises(rv.InvalidArgument, match="a buffer needs its element_type and shape"):
        binding.bind_output("y", buffer_ptr=1)
    with pytest.raises(rv.InvalidArgument, match="input 'x': buffer_ptr is null"):
        binding.bind_input("x", "cpu", 0, np.float32, [2, 3], 0)
    with pytest.raises(errors.NotSupported, match="device 'cuda:0': no provider of this session"):
        binding.bind_output("y", "cuda")
    with pytest.raises(errors.NotSupported, match="strings have no address"):
        binding.bind_output("y", "cpu", 0, str, [2], 1)
    binding.bind_output("y")
    with pytest.raises(rv.InvalidArgument, match="input 'x' is missing"):
        session.run_with_iobinding(binding)
    binding.bind_cpu_input("x", X)
    target = rv.OrtValue.ortvalue_from_shape_and_type([3, 2], np.float32)
    binding.bind_ortvalue_output("y", target)
    with pytest.raises(rv.InvalidArgument, match=r"output 'y': expected shape \[3, 2\], got \[2, 2\]"):
        session.run_with_iobinding(binding)
    with pytest.raises(rv.InvalidArgument, match="holds no tensor"):
        binding.bind_ortvalue_output("y", rv.OrtValue([]))


def test_a_binding_may_be_empty_in_size(model: bytes) -> None:
    session = rv.InferenceSession(model)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, [0, 3], 0)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].shape() == [0, 2]
