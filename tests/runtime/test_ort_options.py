"""ONNX Runtime's options: what they become here, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier import errors
from ranvier.config import SessionConfig
from tests.runtime.ort_scripts import X
from tests.runtime.small_models import linear


@pytest.fixture
def model() -> bytes:
    return linear().SerializeToString()


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
