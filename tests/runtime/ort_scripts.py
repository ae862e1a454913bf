"""Ordinary scripts for ONNX Runtime. Each takes the module, ``onnxruntime`` or ``ranvier``, and gives what it found."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.runtime.small_models import endless, gather, linear, model_of, tensor, two_outputs, written

Script = Callable[[Any, Path], Any]
SCRIPTS: list[Script] = []
X = np.array([[1, -2, 3], [4, 5, -6]], np.float32)


def script(function: Script) -> Script:
    SCRIPTS.append(function)
    return function


def described(arguments: list[Any]) -> list[Any]:
    return [(a.name, a.type, a.shape, str(a)) for a in arguments]


def raised(state: Any, *names: str, calls: list[Callable[[], Any]]) -> list[bool]:
    """For each call: was one of these errors of the module raised?"""
    kinds = tuple(getattr(state, name) for name in names)
    found: list[bool] = []
    for call in calls:
        try:
            call()
        except kinds:
            found.append(True)
        except Exception as error:
            found.append(False)
            print(type(error), error)
    return found


@script
def load_and_run(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(str(written(linear(), folder)), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = session.run(None, {name: X})
    label = session.get_outputs()[0].name
    return outputs, session.run([label], {name: X}), session.run([], {name: X}), type(outputs).__name__


@script
def read_the_interface(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(linear().SerializeToString())
    meta = session.get_modelmeta()
    facts = (
        meta.producer_name,
        meta.graph_name,
        meta.domain,
        meta.description,
        meta.graph_description,
        meta.version,
        meta.custom_metadata_map,
    )
    return described(session.get_inputs()), described(session.get_outputs()), facts


@script
def types_of_all_kinds(ort: Any, folder: Path) -> Any:
    kinds = [
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
        TensorProto.UINT32,
        TensorProto.INT64,
        TensorProto.UINT64,
        TensorProto.BOOL,
        TensorProto.STRING,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E5M2,
        TensorProto.FLOAT8E4M3FNUZ,
        TensorProto.FLOAT8E5M2FNUZ,
    ]
    found = []
    for kind in kinds:
        model = model_of(
            [helper.make_node("Identity", ["x"], ["y"])],
            [tensor("x", kind, ["n", None, 3])],
            [tensor("y", kind, None)],
        )
        session = ort.InferenceSession(model.SerializeToString())
        found.append((described(session.get_inputs()), described(session.get_outputs())))
    return found


@script
def choose_outputs(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(two_outputs().SerializeToString())
    feed = {"a": np.float32([1, 2]), "b": np.float32([3, 5])}
    return [session.run(names, feed) for names in (None, ["difference"], ["difference", "sum"], ["sum", "sum"])]


@script
def override_an_initializer(ort: Any, folder: Path) -> Any:
    model = linear()
    model.graph.input.append(tensor("w", TensorProto.FLOAT, [3, 2]))
    session = ort.InferenceSession(model.SerializeToString())
    described_all = (described(session.get_inputs()), described(session.get_overridable_initializers()))
    return described_all, session.run(None, {"x": X}), session.run(None, {"x": X, "w": np.ones((3, 2), np.float32)})


@script
def options_of_a_session(ort: Any, folder: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = True
    options.log_severity_level = 3
    options.logid = "mine"
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_free_dimension_override_by_name("n", 2)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    session = ort.InferenceSession(linear().SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = ort.InferenceSession(str(folder / "optimized.onnx"))
    return (
        described(session.get_inputs()),
        described(session.get_outputs()),
        session.run(None, {"x": X}),
        saved.run(None, {"x": X}),
        session.get_session_options().intra_op_num_threads,
        options.get_session_config_entry("session.intra_op.allow_spinning"),
        session.get_providers(),
        session.get_provider_options(),
        "CPUExecutionProvider" in ort.get_available_providers(),
        set(ort.get_available_providers()) <= set(ort.get_all_providers()),
        ort.get_device(),
    )


@script
def values(ort: Any, folder: Path) -> Any:
    array = X.copy()
    value = ort.OrtValue.ortvalue_from_numpy(array)
    facts = (
        value.data_type(),
        value.element_type(),
        value.shape(),
        value.device_name(),
        value.is_tensor(),
        value.is_tensor_sequence(),
        value.is_sparse_tensor(),
        value.has_value(),
        value.data_ptr() == array.ctypes.data,
        value.tensor_size_in_bytes(),
        tuple(value.__dlpack_device__()),
    )
    value.update_inplace(np.ones_like(array))
    made = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.int64)
    again = ort.OrtValue.from_dlpack(value)
    return (
        facts,
        array,
        value.numpy(),
        np.asarray(value),
        np.from_dlpack(value),
        (made.data_type(), made.shape()),
        again.numpy(),
        again.data_ptr() == array.ctypes.data,
    )


@script
def run_with_values(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(linear().SerializeToString())
    value = ort.OrtValue.ortvalue_from_numpy(X)
    outputs = session.run_with_ort_values(["y"], {"x": value})
    return (
        [(o.data_type(), o.shape(), o.numpy()) for o in outputs],
        session.run(None, {"x": value}),
        len(session.run_with_ort_values(None, {"x": value})),
    )


@script
def bind_inputs_and_outputs(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(linear().SerializeToString())
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    first = (binding.copy_outputs_to_cpu(), binding.get_outputs()[0].shape())

    x, y = X.copy(), np.zeros((2, 2), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    second = y.copy()
    x *= 2
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()

    target = ort.OrtValue.ortvalue_from_shape_and_type([2, 2], np.float32)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(X))
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    same = binding.get_outputs()[0].data_ptr() == target.data_ptr()
    binding.clear_binding_inputs()
    binding.clear_binding_outputs()
    return first, second, y, target.numpy(), same, binding.get_outputs()


@script
def sequences_optionals_and_maps(ort: Any, folder: Path) -> Any:
    floats = tensor("x", TensorProto.FLOAT, ["n", 3])
    sequence = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    optional = helper.make_value_info("y", helper.make_optional_type_proto(helper.make_tensor_type_proto(1, None)))
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, number))
    named = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, number))
    found = []
    for node, output in (
        (helper.make_node("SequenceConstruct", ["x", "x"], ["y"]), sequence),
        (helper.make_node("Optional", ["x"], ["y"]), optional),
        (
            helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[7, 8, 9]),
            helper.make_value_info("y", maps),
        ),
        (
            helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_strings=["a", "b", "c"]),
            helper.make_value_info("y", named),
        ),
    ):
        model = model_of([node], [floats], [output], opsets={"ai.onnx.ml": 3})
        session = ort.InferenceSession(model.SerializeToString())
        found.append((described(session.get_outputs()), session.run(None, {"x": X})))
    return found


@script
def strings_and_scalars(ort: Any, folder: Path) -> Any:
    model = model_of(
        [helper.make_node("Identity", ["s"], ["t"]), helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)],
        [tensor("s", TensorProto.STRING, ["n"]), tensor("x", TensorProto.FLOAT, ["m"])],
        [tensor("t", TensorProto.STRING, ["n"]), tensor("y", TensorProto.FLOAT, [])],
    )
    session = ort.InferenceSession(model.SerializeToString())
    texts = np.array(["a", "grüß", ""], dtype=object)
    found = [session.run(None, {"s": s, "x": X[0]}) for s in (texts, np.array(["a", "b"]), ["a", "b"])]
    return found, [(type(r).__name__, r.dtype, r.shape) for r in found[0]]


@script
def wrong_inputs(ort: Any, folder: Path) -> Any:
    from importlib import import_module

    state = import_module(f"{ort.__name__}.capi.onnxruntime_pybind11_state")
    session = ort.InferenceSession(linear().SerializeToString())
    arguments = raised(
        state,
        "InvalidArgument",
        calls=[
            lambda: session.run(None, {"x": X.astype(np.float64)}),
            lambda: session.run(None, {"x": X[0]}),
            lambda: session.run(None, {"x": X[:, :2]}),
            lambda: session.run(None, {"x": X, "z": X}),
            lambda: session.run(["nothing"], {"x": X}),
        ],
    )
    try:
        session.run(None, {})
        missing = ""
    except ValueError as error:
        missing = type(error).__mro__[-4].__name__
    indices = ort.InferenceSession(gather().SerializeToString())
    feed = {"x": X[0], "i": np.array([9])}
    running = raised(state, "InvalidArgument", calls=[lambda: indices.run(None, feed)])
    return arguments, missing != "", running


@script
def wrong_models(ort: Any, folder: Path) -> Any:
    state = ort.capi.onnxruntime_pybind11_state
    (folder / "garbage.onnx").write_bytes(b"this is no model")
    unknown = model_of(
        [helper.make_node("NoSuchOp", ["x"], ["y"], domain="nobody")],
        [tensor("x", TensorProto.FLOAT, ["n"])],
        [tensor("y", TensorProto.FLOAT, ["n"])],
        opsets={"nobody": 1},
    )
    undefined = model_of(
        [helper.make_node("Relu", ["q"], ["y"])],
        [tensor("x", TensorProto.FLOAT, ["n"])],
        [tensor("y", TensorProto.FLOAT, ["n"])],
    )
    return (
        raised(state, "NoSuchFile", calls=[lambda: ort.InferenceSession(str(folder / "absent.onnx"))]),
        raised(
            state,
            "InvalidProtobuf",
            calls=[
                lambda: ort.InferenceSession(str(folder / "garbage.onnx")),
                lambda: ort.InferenceSession(b"this is no model either"),
            ],
        ),
        raised(state, "InvalidGraph", "Fail", calls=[lambda: ort.InferenceSession(unknown.SerializeToString())]),
        raised(state, "InvalidArgument", calls=[lambda: ort.InferenceSession(undefined.SerializeToString())]),
        raised(
            state,
            "Fail",
            "InvalidArgument",
            calls=[lambda: ort.SessionOptions().register_custom_ops_library(str(folder / "absent.so"))],
        ),
    )


@script
def stop_a_run(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(endless().SerializeToString())
    options = ort.RunOptions()
    timer = threading.Timer(0.2, lambda: setattr(options, "terminate", True))
    timer.start()
    try:
        session.run(None, {"limit": np.array(np.inf, np.float32)}, options)
    except ort.capi.onnxruntime_pybind11_state.Fail:
        stopped = True
    return stopped, session.run(None, {"limit": np.array(3, np.float32)})


@script
def run_in_the_background(ort: Any, folder: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(linear().SerializeToString(), options)
    found: dict[str, Any] = {}
    done = threading.Semaphore(0)

    def callback(results: Any, key: str, error: str) -> None:
        found[key] = (results, bool(error))
        done.release()

    session.run_async(None, {"x": X}, callback, "good")
    session.run_async(["y"], {"x": X.astype(np.int64)}, callback, "bad")
    assert done.acquire(timeout=30)
    assert done.acquire(timeout=30)
    return found["good"], found["bad"]


@script
def write_a_profile(ort: Any, folder: Path) -> Any:
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.profile_file_prefix = str(folder / "profile")
    session = ort.InferenceSession(linear().SerializeToString(), options)
    session.run(None, {"x": X})
    name = session.end_profiling()
    recorded = json.loads(Path(name).read_text())
    kinds = {event.get("args", {}).get("op_name") for event in recorded}
    started = session.get_profiling_start_time_ns() > 0
    off = ort.InferenceSession(linear().SerializeToString())
    beginning = os.path.basename(name).startswith("profile"), name.endswith(".json")
    return (
        beginning,
        any("MatMul" in kind for kind in kinds if kind),
        started,
        off.end_profiling(),
        off.get_profiling_start_time_ns(),
    )


@script
def read_a_profile(ort: Any, folder: Path) -> Any:
    """As scripts do that sum up the times of operators."""
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.profile_file_prefix = str(folder / "profile")
    session = ort.InferenceSession(linear().SerializeToString(), options, providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run(None, {"x": X})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event["cat"] == "Node"]
    runs = [event["dur"] for event in events if event["cat"] == "Session" and event["name"] == "model_run"]
    kinds = {kind for event in nodes for kind in event["args"]["op_name"].split(" + ")}
    return (
        len(runs),
        "MatMul" in kinds,
        {event["args"]["provider"] for event in nodes},
        all(event["name"].endswith("_kernel_time") and event["ts"] >= 0 for event in nodes),
        0 <= sum(event["dur"] for event in nodes) <= sum(runs),
    )


@script
def catch_errors_of_python(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(linear().SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()

    def unheard_of() -> None:
        ort.SessionOptions().use_the_other_cores = True

    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (AttributeError, unheard_of),
        (RuntimeError, lambda: ort.SessionOptions().get_session_config_entry("session.nothing")),
        (RuntimeError, lambda: binding.bind_cpu_input("nobody", X)),
        (RuntimeError, lambda: session.run_with_iobinding(binding)),
        (RuntimeError, lambda: ort.OrtValue.ortvalue_from_numpy(X.copy()).update_inplace(np.ones((9, 9), np.float32))),
        (RuntimeError, lambda: ort.set_default_logger_severity(9)),
    ]
    found = []
    for kind, call in calls:
        try:
            call()
        except kind:
            found.append(kind.__name__)
    return found, session.run(None, {"x": X})


@script
def bind_values_of_the_session(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(linear().SerializeToString(), providers=["CPUExecutionProvider"])
    value = session.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu")
    value.update_inplace(X)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return [(v.shape(), v.data_type(), v.numpy()) for v in binding.get_outputs_as_ortvaluevector()], value.shape()


@script
def settings_that_change_nothing(ort: Any, folder: Path) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = ort.InferenceSession(
        linear().SerializeToString(),
        options,
        providers=[("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested", "use_arena": "1"})],
        disabled_optimizers=["ConstantFolding", "MatMulAddFusion", "NchwcTransformer"],
    )
    shown = f"{options.graph_optimization_level} {options.execution_mode}"
    return session.get_providers(), session.run(None, {"x": X}), shown


@script
def change_providers(ort: Any, folder: Path) -> Any:
    session = ort.InferenceSession(
        linear().SerializeToString(), providers=[("CPUExecutionProvider", {})], provider_options=None
    )
    before = session.run(None, {"x": X})
    session.disable_fallback()
    session.set_providers(["CPUExecutionProvider"], [{}])
    session.enable_fallback()
    return before, session.run(None, {"x": X}), session.get_providers()


@script
def settings_of_the_module(ort: Any, folder: Path) -> Any:
    ort.set_default_logger_verbosity(0)
    ort.set_seed(42)
    ort.disable_telemetry_events()
    texts = (ort.__version__, ort.get_version_string(), ort.get_build_info())
    return [isinstance(text, str) and text != "" for text in texts], ort.__version__ == ort.get_version_string()
