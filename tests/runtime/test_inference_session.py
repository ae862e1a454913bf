"""ONNX Runtime's interface: its scripts run as they are, with the same results; what is missing says so."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import inspect
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import errors
from ranvier.config import SessionConfig
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY
from tests.runtime.ort_scripts import SCRIPTS, Script, X
from tests.runtime.small_models import endless, gather, linear, model_of, tensor, written


@pytest.fixture
def model() -> bytes:
    return linear().SerializeToString()


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    level = logging.getLogger("ranvier").level
    yield
    logging.getLogger("ranvier").setLevel(level)
    from ranvier.ops import seed

    seed.set_seed(None)


def same(ours: Any, theirs: Any, path: str = "result") -> None:
    """Equal in value, type, element type and shape, all the way down."""
    if isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs), path
        assert len(ours) == len(theirs), path
        for k, (a, b) in enumerate(zip(ours, theirs)):
            same(a, b, f"{path}[{k}]")
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs), path
        for key, b in theirs.items():
            same(ours[key], b, f"{path}[{key!r}]")
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), path
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        if theirs.dtype == object:
            assert ours.tolist() == theirs.tolist(), path
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=path)
    else:
        assert ours == theirs, path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_script_finds_what_it_finds_with_onnxruntime(script: Script, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    onnxruntime.set_default_logger_severity(4)
    folders = [tmp_path / name for name in ("ours", "theirs")]
    for folder in folders:
        folder.mkdir()
    same(script(rv, folders[0]), script(onnxruntime, folders[1]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_script_runs_without_onnxruntime(script: Script, tmp_path: Path) -> None:
    script(rv, tmp_path)


# -- the public surface -----------------------------------------------------------------------------------------------


def test_every_public_name_is_there() -> None:
    for name in [*rv.__all__, "NotImplemented"]:
        assert getattr(rv, name) is not None
        assert name in dir(rv)
    assert rv.errors is errors
    assert rv.capi.onnxruntime_pybind11_state.InvalidArgument is rv.InvalidArgument
    assert rv.capi._pybind_state.Fail is rv.Fail
    assert rv.capi.onnxruntime_inference_collection.OrtValue is rv.OrtValue
    assert rv.__version__ == rv.get_version_string()


def test_type_checkers_see_what_is_there() -> None:
    tree = ast.parse(inspect.getsource(rv))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    lazy = {name: f"ranvier.{module}" for name, module in rv._HOME.items()}
    assert seen == {**lazy, **dict.fromkeys(rv._SUBMODULES, "ranvier")}
    assert set(rv.__all__) == {*seen, "__version__"} - {"NotImplemented"}


def test_import_brings_no_heavy_library() -> None:
    code = (
        "import sys, ranvier; print([m for m in ('numpy', 'onnx', 'ml_dtypes', 'rich', 'typing') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["SparseTensor", "LoraAdapter", "OrtMemoryInfo", "ModelCompiler"])
def test_names_ranvier_lacks_say_so(name: str) -> None:
    with pytest.raises(errors.NotSupported, match=f"ranvier.{name} is not supported: "):
        getattr(rv, name)
    assert not hasattr(rv, name)


def test_unknown_names_are_plain_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rv.nonsense
    assert not hasattr(rv, "_nonsense")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feed", "ours"),
    [
        ({"x": X.astype(np.float64)}, errors.DTypeMismatch),
        ({"x": X[0]}, errors.ShapeMismatch),
        ({"x": X, "z": X}, errors.InvalidInput),
        ({}, errors.InvalidInput),
        ({"x": None}, errors.InvalidInput),
        ({"x": object()}, errors.InvalidInput),
    ],
)
def test_errors_are_ours_and_theirs(model: bytes, feed: Any, ours: type[Exception]) -> None:
    session = rv.InferenceSession(model)
    with pytest.raises(ours) as caught:
        session.run(None, feed)
    assert isinstance(caught.value, rv.InvalidArgument)
    assert not isinstance(caught.value, rv.Fail)  # scripts have an except clause for each
    assert isinstance(caught.value, errors.RanvierError)
    assert type(caught.value).__name__ == ours.__name__


def test_the_native_interface_raises_plain_errors(model: bytes) -> None:
    with rv.load(model) as session, pytest.raises(errors.InvalidInput) as caught:
        session.run({"z": X})
    assert type(caught.value) is errors.InvalidInput


def test_an_error_keeps_its_notes_fields_and_cause() -> None:
    session = rv.InferenceSession(gather().SerializeToString())
    with pytest.raises(errors.InvalidValue, match="out of range") as caught:
        session.run(None, {"x": X[0], "i": np.array([9])})
    assert isinstance(caught.value, rv.InvalidArgument | rv.RuntimeException)
    assert any("while running" in note for note in caught.value.__notes__)
    with pytest.raises(errors.InvalidModel) as missing:
        rv.InferenceSession("no/such/file.onnx")
    assert isinstance(missing.value, rv.NoSuchFile)
    assert isinstance(missing.value.__cause__, FileNotFoundError)
    unknown = model_of(
        [helper.make_node("Nope", ["x"], ["y"], "node", domain="d")],
        [tensor("x", 1, [1])],
        [tensor("y", 1, [1])],
        opsets={"d": 1},
    )
    with pytest.raises(errors.UnsupportedOp) as unsupported:
        rv.InferenceSession(unknown.SerializeToString())
    assert isinstance(unsupported.value, rv.NotImplemented)
    assert unsupported.value.missing[0].op == "Nope"


def test_deadlines_and_limits_are_failures() -> None:
    session = rv.InferenceSession(endless().SerializeToString())
    with pytest.raises(errors.DeadlineExceeded) as late:
        session.run(None, {"limit": np.array(np.inf, np.float32)}, rv.RunOptions(timeout=0.05))
    assert isinstance(late.value, rv.Fail)
    assert isinstance(late.value, TimeoutError)
    options = rv.SessionOptions()
    options.limits = rv.Limits(tensor_bytes=16)
    with pytest.raises(errors.ResourceLimit) as large:
        rv.InferenceSession(linear().SerializeToString(), options)
    assert isinstance(large.value, rv.Fail)


def test_classes_of_errors_can_be_raised_by_scripts() -> None:
    with pytest.raises((rv.Fail, rv.InvalidArgument), match="mine"):
        raise rv.InvalidArgument("mine")


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_become_a_configuration() -> None:
    options = rv.SessionOptions()
    assert options.config() == SessionConfig.default()
    options.intra_op_num_threads = 3
    options.graph_optimization_level = rv.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.logid = "name of it"
    options.limits = rv.Limits(graph_depth=3)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "1000")
    config = options.config()
    assert (config.threads, config.optimization, config.name) == (3, "none", "name of it")
    assert (config.limits.graph_depth, config.fallback, config.fold_limit) == (3, "off", 1000)
    options.optimization = "basic"  # Ranvier's own word wins
    assert options.config().optimization == "basic"
    assert "intra_op_num_threads=3" in repr(options)


@pytest.mark.parametrize(
    ("level", "ours"),
    [
        ("ORT_DISABLE_ALL", "none"),
        ("ORT_ENABLE_BASIC", "basic"),
        ("ORT_ENABLE_EXTENDED", "aggressive"),
        ("ORT_ENABLE_LAYOUT", "aggressive"),
        ("ORT_ENABLE_ALL", "aggressive"),
    ],
)
def test_levels(level: str, ours: str, model: bytes) -> None:
    options = rv.SessionOptions()
    options.graph_optimization_level = getattr(rv.GraphOptimizationLevel, level)
    assert rv.InferenceSession(model, options).report.optimization == ours


def test_every_option_of_a_session_can_be_set() -> None:
    options = rv.SessionOptions()
    for field in fields(SessionConfig):
        if field.name not in ("providers", "provider_options"):
            value = getattr(SessionConfig(), field.name)
            setattr(options, field.name, value)
            assert getattr(options, field.name) == value


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("intra_op_num_thread", 1, "did you mean 'intra_op_num_threads'"),
        ("optimisation", "none", "did you mean 'optimization'"),
        ("intra_op_num_threads", -1, "whole number of 0 or more"),
        ("intra_op_num_threads", "2", "whole number of 0 or more"),
        ("graph_optimization_level", 17, "must be one of ORT_DISABLE_ALL"),
        ("enable_profiling", "yes", "must be True or False"),
        ("profile_file_prefix", 3, "must be text"),
        ("optimization", "extreme", "cannot be 'extreme'"),
        ("limits", 3, "limits must be a Limits"),
    ],
)
def test_options_that_do_not_exist_or_fit(name: str, value: Any, problem: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=problem):
        setattr(rv.SessionOptions(), name, value)


def test_entries_are_checked() -> None:
    options = rv.SessionOptions()
    with pytest.raises(errors.InvalidConfig, match=r"did you mean 'session.intra_op.allow_spinning'"):
        options.add_session_config_entry("session.intra_op.allow_spining", "1")
    with pytest.raises(errors.InvalidConfig, match="was not set"):
        options.get_session_config_entry("session.intra_op.allow_spinning")
    with pytest.raises(errors.NotSupported, match="load_model_format"):
        options.add_session_config_entry("session.load_model_format", "ORT")
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "many")
    with pytest.raises(errors.InvalidConfig, match="is not a number"):
        options.config()
    with pytest.raises(errors.NotSupported, match=r"ranvier\.register_op"):
        options.register_custom_ops_library("ops.so")
    with pytest.raises(errors.NotSupported, match="pass providers"):
        options.add_provider("x", {})


def test_options_can_be_copied(model: bytes) -> None:
    options = rv.SessionOptions()
    options.intra_op_num_threads = 2
    options.precision = "float32"
    again = copy.deepcopy(options)
    again.intra_op_num_threads = 1
    assert options.intra_op_num_threads == 2
    assert rv.InferenceSession(model, again).session.config.threads == 1


def test_free_dimensions() -> None:
    options = rv.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    with pytest.raises(errors.InvalidConfig, match=r"no free dimension 'batch' \(known: n\)"):
        rv.InferenceSession(linear().SerializeToString(), options)
    with pytest.raises(errors.InvalidConfig, match="a size is a whole number"):
        options.add_free_dimension_override_by_name("n", -1)
    options = rv.SessionOptions()
    options.add_free_dimension_override_by_name("n", 4)
    session = rv.InferenceSession(linear().SerializeToString(), options)
    assert [session.get_inputs()[0].shape, session.get_outputs()[0].shape] == [[4, 3], [4, 2]]
    with pytest.raises(rv.InvalidArgument, match=r"expected float32\[4, 3\], got float32\[2, 3\]"):
        session.run(None, {"x": X})


@pytest.mark.parametrize("name", ["n", None])
def test_free_dimensions_by_denotation(name: str | None) -> None:
    proto = linear()
    dim = proto.graph.input[0].type.tensor_type.shape.dim[0]
    dim.Clear()
    if name:
        dim.dim_param = name
    dim.denotation = "DATA_BATCH"
    options = rv.SessionOptions()
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 5)
    session = rv.InferenceSession(proto.SerializeToString(), options)
    assert [session.get_inputs()[0].shape, session.get_outputs()[0].shape[1]] == [[5, 3], 2]
    options.add_free_dimension_override_by_denotation("DATA_BATHC", 5)
    with pytest.raises(errors.InvalidConfig, match=r"denoted 'DATA_BATHC' .did you mean 'DATA_BATCH'"):
        rv.InferenceSession(proto.SerializeToString(), options)


def test_initializers_are_replaced(model: bytes) -> None:
    options = rv.SessionOptions()
    options.add_initializer("w", rv.OrtValue.ortvalue_from_numpy(np.zeros((3, 2), np.float32)))
    options.add_external_initializers(["b"], [rv.OrtValue.ortvalue_from_numpy(np.float32([1, 2]))])
    session = rv.InferenceSession(model, options)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], [[1, 2], [1, 2]])
    for name, value, problem in (
        ("ww", np.zeros((3, 2), np.float32), errors.InvalidConfig),
        ("w", np.zeros((2, 2), np.float32), errors.ShapeMismatch),
        ("w", np.zeros((3, 2), np.float64), errors.DTypeMismatch),
    ):
        options = rv.SessionOptions()
        options.add_initializer(name, value)
        with pytest.raises(problem, match=f"initializer '{name}'"):
            rv.InferenceSession(model, options)
    with pytest.raises(errors.InvalidConfig, match="2 names, 1 values"):
        options.add_external_initializers(["w", "b"], [None])


def test_a_model_in_bytes_with_weights_beside_it(tmp_path: Path) -> None:
    proto = linear(64, 32)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    x = np.ones((1, 64), np.float32)
    expected = rv.InferenceSession(path).run(None, {"x": x})[0]
    options = rv.SessionOptions()
    with pytest.raises(errors.WeightError):
        rv.InferenceSession(path.read_bytes(), options)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    np.testing.assert_array_equal(rv.InferenceSession(path.read_bytes(), options).run(None, {"x": x})[0], expected)


def test_the_optimized_model_is_written(model: bytes, tmp_path: Path) -> None:
    options = rv.SessionOptions()
    options.optimized_model_filepath = tmp_path / "optimized.onnx"
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.onnx.data")
    rv.InferenceSession(model, options)
    assert {p.name for p in tmp_path.iterdir()} == {"optimized.onnx", "optimized.onnx.data"}
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "w.bin")
    with pytest.raises(errors.NotSupported, match=r"weights are written to 'optimized.onnx.data'"):
        rv.InferenceSession(model, options)
    options.optimized_model_filepath = str(tmp_path / "nowhere" / "optimized.onnx")
    with pytest.raises(errors.InvalidConfig, match="is not a folder"):
        rv.InferenceSession(model, options)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_models_in_every_form(model: bytes, tmp_path: Path) -> None:
    path = written(linear(), tmp_path)
    expected = rv.InferenceSession(model).run(None, {"x": X})[0]
    with path.open("rb") as file:
        sessions = [rv.InferenceSession(given) for given in (path, str(path), linear(), file, bytearray(model))]
    for session in sessions:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
    with pytest.raises(errors.InvalidModel, match="not int"):
        rv.InferenceSession(5)
    with pytest.raises(errors.NotSupported, match="for a Graph use Session"):
        rv.InferenceSession(sessions[0].session.graph)


def test_keyword_arguments(model: bytes) -> None:
    session = rv.InferenceSession(model, optimization="none", enable_fallback=0, debug=1)
    config = session.session.config
    assert (config.optimization, config.fallback, config.debug) == ("none", "off", 1)
    with pytest.raises(errors.InvalidConfig, match=r"unknown option 'optimisation'.*did you mean 'optimization'"):
        rv.InferenceSession(model, optimisation="none")
    with pytest.raises(errors.InvalidConfig, match="unknown pass 'Nonsense'"):
        rv.InferenceSession(model, disabled_optimizers=["Nonsense"])
    with pytest.raises(errors.InvalidConfig, match="must be a SessionOptions"):
        rv.InferenceSession(model, {"intra_op_num_threads": 1})
    with pytest.raises(errors.InvalidConfig, match="must be a RunOptions"):
        session.run(None, {"x": X}, {"terminate": True})


@pytest.mark.parametrize(
    ("providers", "options", "problem"),
    [
        (["Nope"], None, "unknown provider 'Nope'"),
        (["CPUExecutionProvder"], None, "did you mean 'CPUExecutionProvider'"),
        (["CPUExecutionProvider"], [{}, {}], "give one for each"),
        ([("CPUExecutionProvider", {})], [{}], "both beside its name"),
        ([("CPUExecutionProvider", {"nonsense": 1})], None, "unknown option 'nonsense'"),
        ([("CPUExecutionProvider",)], None, "a provider is a name or a pair"),
        ([3], None, "a provider is a name or a pair"),
        ([("auto", {"threads": 1})], None, "takes no options"),
        (None, [{}], "no providers they belong to"),
    ],
)
def test_providers_that_are_wrong(model: bytes, providers: Any, options: Any, problem: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=problem):
        rv.InferenceSession(model, providers=providers, provider_options=options)


def test_a_missing_provider_is_passed_over_or_an_error(model: bytes) -> None:
    listed = ["CUDAExecutionProvider", ("TensorrtExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]
    assert rv.InferenceSession(model, providers=listed).get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(errors.ProviderUnavailable) as caught:
        rv.InferenceSession(model, providers=["CUDAExecutionProvider"])
    assert isinstance(caught.value, rv.EPFail)
    assert rv.InferenceSession(model, providers="reference").get_providers()
    assert rv.InferenceSession(model, providers=[]).get_providers() == rv.InferenceSession(model).get_providers()


def test_fallback_is_switched_where_there_is_somewhere_to_fall(model: bytes) -> None:
    class Second(ReferenceProvider):
        name = "second"
        aliases = ("SecondExecutionProvider",)

    REGISTRY.register("second", Second)
    try:
        session = rv.InferenceSession(model, providers=["second", "reference"])
        assert session.get_providers()[0] == "SecondExecutionProvider"
        assert "SecondExecutionProvider" in rv.get_available_providers()
        before = session.session
        session.disable_fallback()
        assert session.session is not before
        assert session.session.config.fallback == "off"
        session.enable_fallback()
        assert session.session.config.fallback == "on"
        session.set_providers(["second"])
        assert session.get_providers() == ["SecondExecutionProvider"]
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], rv.InferenceSession(model).run(None, {"x": X})[0])
    finally:
        REGISTRY.unregister("second")


def test_a_profile_survives_a_change_of_providers(model: bytes, tmp_path: Path) -> None:
    options = rv.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "p")
    options.optimization = "none"
    session = rv.InferenceSession(model, options)
    session.run(None, {"x": X})
    session.set_providers(["reference"])
    session.run(None, {"x": X})
    assert Path(session.end_profiling()).read_text().count('"MatMul"') >= 4
    assert session.end_profiling() == ""


def test_methods_that_are_missing_say_so(model: bytes) -> None:
    session = rv.InferenceSession(model)
    with pytest.raises(errors.NotSupported, match="use run_with_ort_values"):
        session.run_with_ortvaluevector()
    assert not hasattr(session, "get_tuning_results")
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        session.runn()
    assert repr(session).startswith("<InferenceSession 'graph of a test' on ")


def test_a_callback_that_fails_is_logged(model: bytes, caplog: pytest.LogCaptureFixture) -> None:
    session = rv.InferenceSession(model)
    called = threading.Event()

    def callback(results: Any, data: Any, error: str) -> None:
        called.set()
        raise ValueError("in the callback")

    session.run_async(None, {"x": X}, callback, None)
    assert called.wait(30)
    session._executor().shutdown(wait=True)
    assert "in the callback" in caplog.text


def test_arenas_are_given_back_when_a_run_asks_for_it(model: bytes) -> None:
    session = rv.InferenceSession(model)
    options = rv.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session.run(None, {"x": X})
    plans = list(session.session._plans.values())
    assert any(plan._free for plan in plans)
    session.run(None, {"x": X}, options)
    assert not any(plan._free for plan in plans)
    with pytest.raises(errors.InvalidConfig, match="is not supported"):
        options.add_run_config_entry("nonsense", "1")
    with pytest.raises(errors.NotSupported, match="LoRA"):
        options.add_active_adapter(None)
    with pytest.raises(errors.InvalidConfig, match="did you mean 'terminate'"):
        options.terminat = True


# -- values and bindings ----------------------------------------------------------------------------------------------


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
    with pytest.raises(errors.NotSupported, match="device 'cuda'"):
        rv.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
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
    with pytest.raises(errors.NotSupported):
        rv.OrtDevice.make("cuda", 0)


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
    with pytest.raises(errors.NotSupported, match="device 'cuda'"):
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


def test_many_threads_share_a_session(model: bytes) -> None:
    session = rv.InferenceSession(model)
    expected = session.run(None, {"x": X})[0]
    wrong: list[Any] = []

    def work() -> None:
        for rows in (1, 2, 3) * 10:
            x = np.repeat(X[:1], rows, axis=0)
            got = session.run(None, {"x": x})[0]
            if not np.array_equal(got, np.repeat(expected[:1], rows, axis=0)):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- the module -------------------------------------------------------------------------------------------------------


def test_the_log() -> None:
    log = logging.getLogger("ranvier")
    rv.set_default_logger_severity(3)
    assert log.level == logging.ERROR
    rv.set_default_logger_verbosity(2)
    assert log.level == logging.ERROR  # verbosity is for severity 0
    rv.set_default_logger_severity(0)
    rv.set_default_logger_verbosity(2)
    assert log.level == logging.DEBUG - 2
    with pytest.raises(errors.InvalidConfig, match=r"0 .verbose. to 4 .fatal., got 9"):
        rv.set_default_logger_severity(9)
    with pytest.raises(errors.InvalidConfig, match="0 or more"):
        rv.set_default_logger_verbosity(-1)


def test_the_seed_makes_a_repeatable_series() -> None:
    from ranvier.ops.seed import fresh_generator

    def series() -> list[float]:
        rv.set_seed(7)
        return [fresh_generator().random() for _ in range(3)]

    first = series()
    assert first == series()
    assert len(set(first)) == 3
    with pytest.raises(errors.InvalidConfig, match="a seed is a whole number"):
        rv.set_seed(-1)


def test_debug_information(capsys: pytest.CaptureFixture[str]) -> None:
    rv.print_debug_info()
    shown = capsys.readouterr().out
    assert "numpy=" in shown
    assert "CPUExecutionProvider" in shown
    assert rv.get_device() == "CPU"
    assert not rv.has_collective_ops()
    rv.preload_dlls(cuda=True)
    rv.enable_telemetry_events()


# -- operators of one's own -------------------------------------------------------------------------------------------


def custom_model(domain: str = "mine", version: int = 1, **attributes: Any) -> bytes:
    node = helper.make_node("Scale", ["x"], ["y"], "scale", domain=domain, **attributes)
    floats = [tensor("x", TensorProto.FLOAT, ["n"])], [tensor("y", TensorProto.FLOAT, None)]
    return model_of([node], *floats, opsets={domain: version}).SerializeToString()


@pytest.fixture
def registered() -> Iterator[Any]:
    """Registers like ``rv.register_op`` and takes everything back afterwards."""
    names: list[tuple[str, str]] = []

    def register(domain: str, name: str, *args: Any, **kwargs: Any) -> Any:
        definition = rv.register_op(domain, name, *args, **kwargs)
        names.append((domain, name))
        return definition

    yield register
    for domain, name in dict.fromkeys(names):
        with contextlib.suppress(errors.InvalidConfig):
            rv.unregister_op(domain, name)


def scale(x: np.ndarray, *, by: float = 2.0) -> np.ndarray:
    return x * np.float32(by)


def test_an_operator_of_ones_own(registered: Any) -> None:
    with pytest.raises(errors.UnsupportedOp, match="mine::Scale"):
        rv.load(custom_model())
    registered("mine", "Scale", scale)
    x = np.float32([1, 2])
    with rv.load(custom_model()) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], [2, 4])
    session_of_theirs = rv.InferenceSession(custom_model(by=3.0))
    np.testing.assert_array_equal(session_of_theirs.run(None, {"x": x})[0], [3, 6])
    rv.unregister_op("mine", "Scale")
    np.testing.assert_array_equal(session_of_theirs.run(None, {"x": x})[0], [3, 6])  # a session keeps what it has
    with pytest.raises(errors.UnsupportedOp):
        rv.load(custom_model())
    with pytest.raises(errors.InvalidConfig, match="mine::Scale was not registered"):
        rv.unregister_op("mine", "Scale")


def test_types_of_an_operator_of_ones_own(registered: Any) -> None:
    registered("mine", "Scale", scale, infer=lambda call: [call.type(0)])
    assert rv.InferenceSession(custom_model()).get_outputs()[0].shape == ["n"]


def test_versions_of_an_operator_of_ones_own(registered: Any) -> None:
    registered("mine", "Scale", scale)
    registered("mine", "Scale", lambda x: x * np.float32(10), version=3)
    x = np.float32([1])
    found = [rv.load(custom_model(version=v)).run({"x": x})["y"].tolist() for v in (1, 2, 3, 4)]
    assert found == [[2], [2], [10], [10]]
    rv.unregister_op("mine", "Scale", version=3)
    assert rv.load(custom_model(version=4)).run({"x": x})["y"].tolist() == [2]


def test_replacing_and_restoring(registered: Any) -> None:
    relu = linear().SerializeToString()
    expected = rv.load(relu, optimization="none").run({"x": X})["y"]
    with pytest.raises(errors.InvalidConfig, match=r"operator Relu is already declared.*replace=True"):
        rv.register_op("", "Relu", np.abs, version=14)
    registered("ai.onnx", "Relu", lambda x: -np.abs(x), version=14, replace=True)
    assert (rv.load(relu, optimization="none").run({"x": X})["y"] <= 0).all()
    registered("", "Relu", np.negative, version=14, replace=True)  # a second time: the original is still remembered
    rv.unregister_op("", "Relu")
    np.testing.assert_array_equal(rv.load(relu, optimization="none").run({"x": X})["y"], expected)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (np.square, [1, 4]),  # compiled, without a signature
        (lambda x: float(x.sum()), 3.0),
        (lambda x: x.sum(), 3.0),
        (lambda x, *, ctx: x * ctx.outputs, [1, 2]),
        (lambda *xs: xs[0], [1, 2]),
    ],
)
def test_functions_of_every_form(registered: Any, function: Any, expected: Any) -> None:
    registered("mine", "Scale", function)
    assert rv.load(custom_model()).run({"x": np.float32([1, 2])})["y"].tolist() == expected


def test_functions_that_fail(registered: Any) -> None:
    def broken(x: np.ndarray) -> Any:
        raise KeyError("inside")

    registered("mine", "Scale", broken)
    session = rv.InferenceSession(custom_model())
    with pytest.raises(errors.KernelError, match="Scale 'scale' failed on reference: KeyError: 'inside'") as caught:
        session.run(None, {"x": np.float32([1])})
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, rv.RuntimeException)
    registered("mine", "Scale", lambda x: object(), replace=True)
    with pytest.raises(errors.InvalidValue, match="the function returned object"):
        rv.load(custom_model()).run({"x": np.float32([1])})
    registered("mine", "Scale", scale, replace=True)
    with pytest.raises(errors.InvalidValue, match="unknown attribute 'bye'"):
        rv.load(custom_model(bye=1.0)).run({"x": np.float32([1])})


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("d", "", scale), {}, "needs a name"),
        (("d", "Op", 3), {}, "expected a function, got int"),
        (("d", "Op", scale), {"version": 0}, "version must be a whole number"),
        (("d", "Op", scale), {"traits": ("randm",)}, "did you mean 'random'"),
    ],
)
def test_registrations_that_are_wrong(arguments: Any, options: Any, problem: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=problem):
        rv.register_op(*arguments, **options)


def test_sessions_go_when_nobody_holds_them(model: bytes) -> None:
    import weakref

    session = rv.InferenceSession(model)
    session.run(None, {"x": X})
    binding = session.io_binding()
    ref = weakref.ref(session)
    del session
    gc.collect()
    assert ref() is None
    assert binding.get_outputs() == []
