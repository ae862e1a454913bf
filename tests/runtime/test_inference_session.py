"""ONNX Runtime's interface: its scripts run as they are, with the same results; what is missing says so."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import ranvier as rv
from ranvier import errors
from ranvier.passes import default_passes
from ranvier.providers.openvino import OpenVinoOptions
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.ort.errors import InvalidArgument, OrtError, _combined
from ranvier.runtime.ort.optimizers import _IDLE, _PASSES
from ranvier.runtime.ort.providers import _translated
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


def test_errors_that_are_also_pythons_own_cross_a_process(model: bytes) -> None:
    """Also those that were given ONNX Runtime's classes before: a run inside a run with a binding."""
    session = rv.InferenceSession(model)
    binding = session.io_binding()
    binding.bind_output("y")
    with pytest.raises(RuntimeError) as caught:
        session.run_with_iobinding(binding)
    assert isinstance(caught.value, rv.InvalidArgument) and type(caught.value).__name__ == "InvalidInput"
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is errors.InvalidInput and str(again) == str(caught.value)
    with pytest.raises(errors.InvalidConfig) as unknown:
        rv.SessionOptions().nonsense = 1
    assert isinstance(pickle.loads(pickle.dumps(unknown.value)), AttributeError)


def _kinds(kind: type[errors.RanvierError]) -> Iterator[type[errors.RanvierError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def test_every_error_can_be_pythons_own_as_well() -> None:
    own = [kind for kind in _kinds(errors.RanvierError) if getattr(errors, kind.__name__, None) is kind]
    assert len(own) > 10
    for kind in own:
        combined = _combined(kind, (InvalidArgument, RuntimeError))
        assert issubclass(combined, kind) and issubclass(combined, RuntimeError) and issubclass(combined, OrtError)


def test_a_session_outlives_a_change_of_providers_that_fails(model: bytes) -> None:
    session = rv.InferenceSession(model)
    before = session.run(None, {"x": X})
    with pytest.raises(RuntimeError, match="unknown provider 'Nope'") as caught:
        session.set_providers(["Nope"])
    assert isinstance(caught.value, errors.InvalidConfig)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], before[0])


def test_optimizers_by_onnxruntimes_names(model: bytes) -> None:
    def off(*names: str) -> tuple[str, ...]:
        return rv.InferenceSession(model, disabled_optimizers=list(names)).session.config.disabled_passes

    known = {each.name for each in default_passes()}
    assert set(_PASSES.values()) <= known and not _PASSES.keys() & _IDLE
    assert off("ConstantFolding", "GeluFusion", "FastGeluFusion") == ("fold_constants", "fuse_activations")
    assert off("NchwcTransformer", "cancel") == ("cancel",)


def test_options_of_openvino_by_onnxruntimes_names() -> None:
    given = {"device_type": "CPU", "precision": "FP16", "num_of_threads": 2, "cache_dir": "x"}
    found = _translated("OpenVINOExecutionProvider", given)
    assert found == {"plugin": "CPU", "precision": "f16"}
    OpenVinoOptions(**found)
    assert _translated("OpenVINOExecutionProvider", {"precision": "ACCURACY"}) == {"precision": "f32"}
    assert _translated("openvino", {"load_config": "{}"}) == {"load_config": "{}"}  # and is refused there


def test_classes_of_errors_can_be_raised_by_scripts() -> None:
    with pytest.raises((rv.Fail, rv.InvalidArgument), match="mine"):
        raise rv.InvalidArgument("mine")


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
    listed = ["ROCMExecutionProvider", ("TensorrtExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]
    assert rv.InferenceSession(model, providers=listed).get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(errors.ProviderUnavailable) as caught:
        rv.InferenceSession(model, providers=["ROCMExecutionProvider"])
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
    assert Path(session.end_profiling()).read_text().count('"op": "MatMul') >= 2
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
    plans = session.session._compiled.plans()
    assert any(plan._arenas.waiting for plan in plans)
    session.run(None, {"x": X}, options)
    assert not any(plan._arenas.waiting for plan in plans)
    with pytest.raises(errors.InvalidConfig, match="is not supported"):
        options.add_run_config_entry("nonsense", "1")
    with pytest.raises(errors.NotSupported, match="LoRA"):
        options.add_active_adapter(None)
    with pytest.raises(errors.InvalidConfig, match="did you mean 'terminate'"):
        options.terminat = True


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


def test_sessions_go_when_nobody_holds_them(model: bytes) -> None:
    session = rv.InferenceSession(model)
    session.run(None, {"x": X})
    binding = session.io_binding()
    ref = weakref.ref(session)
    del session
    gc.collect()
    assert ref() is None
    assert binding.get_outputs() == []


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
