"""ONNX Runtime's way to keep inputs and outputs on a device: values there, bindings by value and by address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from tests.torch.device import TORCH_DEVICE, options  # noqa: E402

MODEL = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["" : 20]>
    g (float[n, 3] x, float[3] b) => (float[n, 3] y, float[n, 3] z) { y = Add(x, b) z = Mul(y, y) }"""
).SerializeToString()
X = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1, 2, 3], np.float32)


def made(providers: tuple[str, ...] = ("cuda", "reference"), **more: Any) -> rv.InferenceSession:
    given = [options(**more).get(name, {}) for name in providers]
    return rv.InferenceSession(MODEL, providers=list(providers), provider_options=given)


@pytest.fixture
def session() -> Iterator[rv.InferenceSession]:
    found = made()
    yield found
    found.session.close()


def there(array: np.ndarray) -> rv.OrtValue:
    return rv.OrtValue.ortvalue_from_numpy(array, "cuda", 0)


def test_a_value_on_the_device(session: rv.InferenceSession) -> None:
    source = X.copy()
    value = there(source)
    source[:] = 0  # the value has its own memory
    assert (value.device_name(), value.shape(), value.data_type()) == ("cuda", [2, 3], "tensor(float)")
    assert value.is_tensor() and value.tensor_size_in_bytes() == 24 and value.data_ptr() != 0
    np.testing.assert_array_equal(value.numpy(), X)
    np.testing.assert_array_equal(np.asarray(value), X)
    value.update_inplace(X + 1)
    np.testing.assert_array_equal(value.numpy(), X + 1)
    with pytest.raises(errors.ShapeMismatch, match="update_inplace"):
        value.update_inplace(X[0])
    with pytest.raises(errors.DTypeMismatch, match="expected float32, got float64"):
        value.update_inplace(X.astype(np.float64))
    assert torch.from_dlpack(value).device == torch.device(TORCH_DEVICE)
    zeros = rv.OrtValue.ortvalue_from_shape_and_type([2, 0, 3], np.float16, "cuda", 0)
    assert zeros.shape() == [2, 0, 3] and zeros.numpy().dtype == np.float16
    narrow = there(X.astype(ml_dtypes.bfloat16))
    assert narrow.data_type() == "tensor(bfloat16)" and narrow.numpy().dtype == ml_dtypes.bfloat16
    with pytest.raises(errors.NotSupported, match="strings"):
        there(np.array(["a"], object))


@pytest.mark.parametrize("graphs", [False, True])
def test_inputs_and_outputs_stay(graphs: bool) -> None:
    session = made(cuda_graphs=graphs)
    binding = session.io_binding()
    x = there(X)
    binding.bind_ortvalue_input("x", x)
    binding.bind_cpu_input("b", B)
    binding.bind_output("y", "cuda")
    binding.bind_output("z")
    kept = []
    for k in range(5):
        x.update_inplace(X + k)
        session.run_with_iobinding(binding)
        y, z = binding.get_outputs()
        assert (y.device_name(), z.device_name()) == ("cuda", "cpu")
        assert isinstance(z.value, np.ndarray)
        kept.append(y)
        np.testing.assert_array_equal(z.numpy(), (X + k + B) ** 2)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], X + k + B)
    for k, y in enumerate(kept):  # each run had memory of its own
        np.testing.assert_array_equal(y.numpy(), X + k + B)
    session.session.close()


def test_outputs_are_inputs_of_the_next_run(session: rv.InferenceSession) -> None:
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", there(X))
    binding.bind_ortvalue_input("b", there(B))
    binding.bind_output("y", "cuda")
    for k in range(1, 4):
        session.run_with_iobinding(binding)
        (y,) = binding.get_outputs()
        np.testing.assert_array_equal(y.numpy(), X + k * B)
        binding.bind_ortvalue_input("x", y)


@pytest.mark.parametrize("unsynchronized", ["0", "1"])
def test_memory_by_its_address(session: rv.InferenceSession, unsynchronized: str) -> None:
    x, y = there(X), rv.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32, "cuda", 0)
    z = rv.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32, "cuda", 0)
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, [2, 3], x.data_ptr())
    binding.bind_input("b", "cpu", 0, np.float32, [3], B.ctypes.data)
    binding.bind_output("y", "cuda", 0, np.float32, [2, 3], y.data_ptr())
    binding.bind_ortvalue_output("z", z)
    choice = rv.RunOptions()
    choice.add_run_config_entry("disable_synchronize_execution_providers", unsynchronized)
    for k in range(3):
        x.update_inplace(X + k)
        session.run_with_iobinding(binding, choice)
        binding.synchronize_outputs()
        np.testing.assert_array_equal(y.numpy(), X + k + B)
        np.testing.assert_array_equal(z.numpy(), (X + k + B) ** 2)
        assert binding.get_outputs()[1] is z


def test_tensors_of_torch(session: rv.InferenceSession) -> None:
    value = rv.OrtValue.from_dlpack(there(X).value)
    assert value.device_name() == "cuda"
    value.value.mul_(2)
    np.testing.assert_array_equal(value.numpy(), X * 2)
    y, z = session.run_with_ort_values(None, {"x": value, "b": there(B)})
    assert y.device_name() == z.device_name() == "cpu"
    np.testing.assert_array_equal(y.numpy(), X * 2 + B)
    assert rv.OrtValue.from_dlpack(torch.from_numpy(X)).device_name() == "cpu"


def test_a_session_of_the_host_reads_values_of_the_device(session: rv.InferenceSession) -> None:
    other = made(("reference",))
    x = there(X)
    np.testing.assert_array_equal(other.run(["y"], {"x": x, "b": B})[0], X + B)
    binding = other.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_cpu_input("b", B)
    binding.bind_output("y")
    x.update_inplace(X + 1)
    other.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], X + 1 + B)
    with pytest.raises(errors.NotSupported, match="no provider of this session"):
        binding.bind_output("y", "cuda")
    with pytest.raises(errors.NotSupported, match="no provider of this session"):
        binding.bind_ortvalue_output("y", x)


def test_results_of_the_host_are_brought_where_they_are_wanted(session: rv.InferenceSession) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]>g (float[n] x) => (int64[1, m] y) { y = NonZero(x) }'
    ).SerializeToString()
    found = rv.InferenceSession(model, providers=["cuda", "reference"], provider_options=[options()["cuda"], {}])
    binding = found.io_binding()
    binding.bind_cpu_input("x", np.array([0, 1, 2], np.float32))
    binding.bind_output("y", "cuda")
    found.run_with_iobinding(binding)
    (y,) = binding.get_outputs()
    assert y.device_name() == "cuda"
    np.testing.assert_array_equal(y.numpy(), [[1, 2]])


def test_wrong_bindings(session: rv.InferenceSession) -> None:
    binding = session.io_binding()
    with pytest.raises(errors.InvalidInput, match="buffer_ptr is null"):
        binding.bind_input("x", "cuda", 0, np.float32, [2, 3], 0)
    with pytest.raises(errors.NotSupported, match="strings have no address"):
        binding.bind_output("y", "cuda", 0, str, [2], 1)
    binding.bind_ortvalue_input("x", there(X))
    binding.bind_cpu_input("b", B)
    binding.bind_ortvalue_output("y", there(np.zeros((3, 2), np.float32)))
    with pytest.raises(errors.ShapeMismatch, match=r"output 'y': expected shape \[3, 2\], got \[2, 3\]"):
        session.run_with_iobinding(binding)


def test_options_by_the_names_of_onnx_runtime() -> None:
    given = {
        "device_id": options()["cuda"]["device"],
        "gpu_mem_limit": str(2**64 - 1),
        "enable_cuda_graph": "1",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
    session = rv.InferenceSession(MODEL, providers=[("CUDAExecutionProvider", given), "CPUExecutionProvider"])
    (chosen,) = (p for p in session.session.providers if p.name == "cuda")
    assert (chosen.options.cuda_graphs, chosen.options.memory_limit, chosen.options.precision) == (True, None, "f32")  # type: ignore[attr-defined]
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    np.testing.assert_array_equal(session.run(["y"], {"x": X, "b": B})[0], X + B)
    with pytest.raises(errors.InvalidConfig, match="unknown option 'device_ids'"):
        rv.InferenceSession(MODEL, providers=[("CUDAExecutionProvider", {**given, "device_ids": 1})])
