"""Models and samples that are unlike the usual: that they come out right in other runtimes, or are refused clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, InvalidInput
from ranvier.formats.onnx import read, save
from ranvier.runtime.quantizing import Quantization, Quantizer, feeds_of, prepared, read_samples
from ranvier.runtime.quantizing import maker as maker_file
from ranvier.runtime.quantizing.options import ALL_SCHEMES
from ranvier.runtime.quantizing.report import Off, difference
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.session import Session
from tests.exact_peer import exact

Array = np.ndarray[Any, Any]
CONFIG = SessionConfig(threads=1)
RNG = np.random.default_rng(4)


def numbers(*shape: int) -> Array:
    return (RNG.standard_normal(shape) * 0.2).astype(np.float32)


def model_of(nodes: list[Any], inputs: dict[str, Any], outputs: list[str], weights: dict[str, Array]) -> Any:
    made = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def quantized(model: Any, data: dict[str, Array], **options: Any) -> tuple[Any, Any]:
    graph = prepared(read(model), CONFIG)
    return Quantizer(graph, feeds_of(graph, data), Quantization(slower=1e9, **options), CONFIG).run(force=True)


def exact_of(model: Any, feed: dict[str, Array]) -> Array:
    (found,) = results(read(model), [feed], CONFIG)
    return found[0]


def results_elsewhere(graph: Any, path: Path, feed: dict[str, Array]) -> list[Array]:
    save(graph, path)
    onnx.checker.check_model(onnx.load(path))
    return exact(path).run(None, feed)


def test_what_channels_are_scaled_by_is_part_of_layers(tmp_path: Path) -> None:
    """Also where results change by rounding, and an activation in many steps is one: codes round far more."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Mul", ["g", "c"], ["m"]),
        helper.make_node("Add", ["m", "s"], ["a"]),
        helper.make_node("Add", ["a", "three"], ["t"]),
        helper.make_node("Clip", ["t", "zero", "six"], ["k"]),
        helper.make_node("Mul", ["a", "k"], ["h"]),
        helper.make_node("Div", ["h", "six"], ["y"]),
    ]
    constants = {"w": numbers(16, 8, 3, 3), "g": np.float32([1.7]), "s": numbers(16, 1, 1)}
    sides = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    model = model_of(nodes, {"x": [2, 8, 9, 9]}, ["y"], {**constants, **sides})
    graph = prepared(read(model), CONFIG)
    assert [node.op for node in graph] == ["Conv", "HardSwish"]
    x = RNG.standard_normal((2, 8, 9, 9)).astype(np.float32)
    expected = exact_of(model, {"x": x})
    (whole,) = results(graph, [{"x": x}], CONFIG)
    np.testing.assert_allclose(whole[0], expected, rtol=1e-5, atol=1e-5)
    made, report = quantized(model, {"x": x})
    assert [layer.scheme for layer in report.layers] == ["int8"]
    (elsewhere,) = results_elsewhere(made, tmp_path / "m.onnx", {"x": x})
    np.testing.assert_allclose(elsewhere, expected, atol=0.02 * np.abs(expected).max())


def tied() -> Any:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "w", "b"], ["c"], "second"),
        helper.make_node("MatMul", ["c", "w"], ["y"], "third"),
    ]
    return model_of(nodes, {"x": ["n", 32]}, ["y"], {"w": numbers(32, 32), "b": numbers(32)})


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_layers_that_share_weights_share_their_codes(tmp_path: Path, scheme: str) -> None:
    data, model = {"x": RNG.standard_normal((16, 32)).astype(np.float32)}, tied()
    made, report = quantized(model, data, scheme=scheme)
    found = results_elsewhere(made, tmp_path / "q.onnx", data)[0]
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, data)[0]
    bound = {"ternary": 1.5, "int2": 1.2, "uint2": 1.0}.get(scheme, 0.4)
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)
    assert report.bytes_after < report.bytes_before
    assert sum(value.name.startswith("w.codes") for value in made.constants.values()) == 1


@pytest.mark.parametrize("shape", [(), (1,), (48,), (1, 48), (1, 1)])
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4", "fp8"])
def test_every_bias_that_is_a_row(tmp_path: Path, scheme: str, shape: tuple[int, ...]) -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "dense")
    model = model_of([node], {"x": ["n", 32]}, ["y"], {"w": numbers(32, 48), "b": numbers(*shape) + np.float32(1)})
    data = {"x": RNG.standard_normal((16, 32)).astype(np.float32)}
    made, _ = quantized(model, data, scheme=scheme)
    found = results_elsewhere(made, tmp_path / "q.onnx", data)[0]
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, data)[0]
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


def test_a_group_holds_no_more_than_there_is() -> None:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"x": [2, 16]}, ["y"], {"w": numbers(16, 32)}
    )
    made, _ = quantized(model, {"x": numbers(2, 16)}, scheme="int4", group=128)
    assert made.nodes[0].attrs["block_size"] == 16


def test_layers_without_numbers_are_named() -> None:
    weights = numbers(32, 32)
    weights[3, 4] = np.nan
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "dense")], {"x": [4, 32]}, ["y"], {"w": weights})
    for scheme in ("int8", "int4", "fp8", "nf4", "ternary"):
        with pytest.raises(InvalidConfig, match="infinite or NaN") as refused:
            quantized(model, {"x": numbers(4, 32)}, scheme=scheme)
        assert "'dense'" in refused.value.__notes__[0]


def test_recurrent_layers_have_an_error() -> None:
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["o"], "lstm", hidden_size=32),
        helper.make_node("MatMul", ["o", "v"], ["y"], "dense"),
    ]
    weights = {"w": numbers(1, 128, 32), "r": numbers(1, 128, 32), "v": numbers(32, 32)}
    _, report = quantized(model_of(nodes, {"x": [5, 1, 32]}, ["y"], weights), {"x": numbers(20, 1, 32)})
    errors = {layer.name: layer.error for layer in report.layers}
    assert errors["lstm"] is not None and 0 < errors["lstm"] < 0.05


@pytest.mark.parametrize("scheme, count, shown", [("int4", 3, 3), ("int4", 20, 4), ("gptq", 16, 4), ("gptq", 8, 2)])
def test_errors_of_layers_are_of_many_samples(scheme: str, count: int, shown: int) -> None:
    """Of those held back where there are any, which the scheme had no look at."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "dense")]
    model = model_of(nodes, {"x": [1, 32]}, ["y"], {"w": numbers(32, 32)})
    x = numbers(count, 32) * np.geomspace(0.1, 10, count, dtype=np.float32)[:, None]
    made, report = quantized(model, {"x": x}, scheme=scheme)
    assert report.layer_samples == shown and report.held == (shown if scheme == "gptq" else 0)
    held = [k for k in range(count) if k % 8 in (2, 5)] if report.held else range(shown)
    feeds = [{"x": x[k : k + 1]} for k in held]
    rows = [list(results(graph, feeds, CONFIG)) for graph in (made, prepared(read(model), CONFIG))]
    (layer,) = report.layers
    assert layer.error == pytest.approx(difference(*rows).error, rel=1e-3)


def test_the_error_of_one_value_after_the_other() -> None:
    rng = np.random.default_rng(3)
    expected = [rng.standard_normal((2, 5)) for _ in range(4)]
    expected[2][0, 1] = np.inf
    found = [each + 0.1 * rng.standard_normal(each.shape) for each in expected]
    found[2][0, 1] = np.inf
    off = Off()
    for one, other in zip(found, expected):
        off.add(one, other)
    assert off.error == pytest.approx(difference([[x] for x in found], [[x] for x in expected]).error)
    off.add(np.array([np.nan]), np.array([1.0]))
    assert off.error == np.inf
    off.add(np.ones(2), np.ones(3))
    assert off.error is None
    assert Off().error is None, "nothing was seen"


def test_a_cosine_for_weights_alone() -> None:
    data = {"x": RNG.standard_normal((16, 32)).astype(np.float32)}
    model = tied()
    _, loose = quantized(model, data, scheme="int4")
    wanted = (1 + loose.difference.cosine) / 2
    _, tight = quantized(model, data, scheme="int4", cosine=wanted)
    assert loose.difference.cosine < wanted <= tight.difference.cosine
    assert any(layer.reason for layer in tight.layers) and not tight.problems
    graph = prepared(read(model), CONFIG)
    with pytest.raises(InvalidConfig, match="without samples"):
        Quantizer(graph, [], Quantization("int4", max_error=0.1), CONFIG).run()


def test_codes_are_found_once_for_all_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = tied(), []
    graph = prepared(read(model), CONFIG)
    feeds = feeds_of(graph, {"x": RNG.standard_normal((16, 32)).astype(np.float32)})
    made = Quantizer(graph, feeds, Quantization("awq", slower=1e9, max_error=1e-6), CONFIG)
    quantize = maker_file.quantize_weights

    def counting(*args: Any, known: dict[Any, Any], **options: Any) -> None:
        before = len(known)
        quantize(*args, known=known, **options)
        counted.append(len(known) - before)

    monkeypatch.setattr(maker_file, "quantize_weights", counting)
    made.run(force=True)
    assert len(counted) > 2 and sum(counted) == 1


@pytest.mark.parametrize("options", [{"group": 48}, {"group": 8}, {"group": 512}, {"cosine": 1.5}, {"cosine": 0.0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        Quantization("int4", **options)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_samples_that_say_nothing() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "m"), helper.make_node("Add", ["a", "z"], ["y"])]
    graph = prepared(read(model_of(nodes, {"x": ["n", 32], "z": ["n", 8]}, ["y"], {"w": numbers(32, 8)})), CONFIG)
    good = {"x": numbers(32, 32), "z": numbers(32, 8)}
    assert [len(feed["x"]) for feed in feeds_of(graph, good)] == [2] * 16
    assert len(feeds_of(graph, {name: array[:5] for name, array in good.items()})) == 5
    with pytest.raises(InvalidInput, match="'z' has 30 samples, and 'x' has 32"):
        feeds_of(graph, {**good, "z": good["z"][:30]})
    with pytest.raises(InvalidInput, match="no samples"):
        feeds_of(graph, {**good, "x": good["x"][:0]})
    bad = good["x"].copy()
    bad[7, 3] = np.nan
    with pytest.raises(InvalidInput, match="'x': sample 7 holds NaN"):
        feeds_of(graph, {**good, "x": bad})


def test_files_that_hold_no_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", x=numbers(4, 3))
    np.testing.assert_array_equal(read_samples(tmp_path / "good.npz")["x"], np.load(tmp_path / "good.npz")["x"])
    whole = (tmp_path / "good.npz").read_bytes()
    np.save(tmp_path / "one.npy", numbers(4, 3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    damaged = bytearray(whole)
    damaged[60:120] = bytes(60)
    for name, content in {"empty": b"", "cut": whole[:100], "text": b"hello", "damaged": bytes(damaged)}.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
    for name in ("empty.npz", "cut.npz", "text.npz", "damaged.npz", "one.npy", "objects.npz", "absent.npz", "."):
        with pytest.raises(InvalidInput, match="npz"):
            read_samples(tmp_path / name)


# -- results that are not finite --------------------------------------------------------------------------------------


def test_results_that_are_not_finite_have_to_be_the_same() -> None:
    expected = np.array([[1.0, -np.inf, 2.0, np.nan]], np.float32)
    near = difference([[expected * np.float32(1.01)]], [[expected]])
    assert near.error == pytest.approx(0.01, rel=1e-3) and near.cosine == pytest.approx(1.0)
    for wrong in (np.nan_to_num(expected, neginf=-1e9), np.where(expected == 2.0, np.nan, expected)):
        lost = difference([[wrong]], [[expected]])
        assert lost.error == np.inf and lost.cosine == -1.0


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT8E5M2])
def test_results_of_every_float_type_are_compared(kind: int) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "m"), helper.make_node("Cast", ["a"], ["y"], "c", to=kind)]
    model = model_of(nodes, {"x": [4, 32]}, [], {"w": numbers(32, 48)})
    model.graph.output.append(helper.make_tensor_value_info("y", kind, None))
    data = {"x": RNG.standard_normal((4, 32)).astype(np.float32)}
    _, report = quantized(model, data, scheme="int4")
    assert 0.03 < report.difference.error < 0.2 and report.difference.cosine < 0.9999
    assert quantized(model, data, scheme="int4", max_error=1e-3)[1].problems


def test_results_that_are_zeros_are_near_if_they_are_zeros() -> None:
    ones, zeros = [[np.ones((2, 3))] * 2], [[np.ones((2, 3)), np.zeros((2, 3))]]
    same = difference(zeros, zeros)
    assert same.cosine == 1 and max(same.error, same.turn, same.even_turn, same.most_turn) < 1e-12
    assert difference(ones, zeros).cosine == 0 and difference(ones, zeros).error > 1e9


@pytest.mark.parametrize("size", [1e-16, 1e-36])
def test_results_that_are_small_have_a_cosine(size: float) -> None:
    expected = [[(numbers(4, 8) * size).astype(np.float32)] for _ in range(3)]
    found = difference([[1.5 * array for array in row] for row in expected], expected)
    assert found.cosine == pytest.approx(1) and found.error == pytest.approx(0.5, rel=1e-4)
    assert found.turn < 1e-3 and found.most_turn < 1e-3


def test_results_that_are_sequences() -> None:
    """Of arrays that differ in size."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "m"),
        helper.make_node("SplitToSequence", ["a", "sizes"], ["y"], "s", axis=1),
    ]
    weights = {"w": numbers(32, 48), "sizes": np.array([20, 28])}
    model = model_of(nodes, {"x": [4, 32]}, [], weights)
    model.graph.output.append(helper.make_tensor_sequence_value_info("y", 1, None))
    _, report = quantized(model, {"x": RNG.standard_normal((4, 32)).astype(np.float32)}, scheme="int4")
    assert 0.03 < report.difference.error < 0.2


@pytest.mark.parametrize("scheme", ["int8", "gptq"])
def test_an_input_that_begins_empty(tmp_path: Path, scheme: str) -> None:
    """As what a decoder remembers of the tokens before the first."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Concat", ["past", "a"], ["c"], "join", axis=1),
        helper.make_node("MatMul", ["c", "v"], ["y"], "second"),
        helper.make_node("MatMul", ["past", "v"], ["z"], "third"),
    ]
    inputs = {"x": ["n", "t", 32], "past": ["n", "p", 48]}
    model = model_of(nodes, inputs, ["y", "z"], {"w": numbers(32, 48), "v": numbers(48, 20)})
    x = RNG.standard_normal((8, 3, 32)).astype(np.float32)
    data = {"x": x, "past": np.zeros((8, 0, 48), np.float32)}
    made, report = quantized(model, data, scheme=scheme)
    assert report.difference.error < 0.12 and report.difference.agreement is not None
    later = {"x": x, "past": numbers(8, 2, 48)}
    assert results_elsewhere(made, tmp_path / "q.onnx", later)[0].shape == (8, 5, 20)


def test_groups_larger_than_layers() -> None:
    weights = {"w": numbers(20, 32)}
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"x": [2, 20]}, ["y"], weights)
    for scheme, size in (("int4", 32), ("gptq", 32), ("nf4", 256), ("ternary", 32)):
        made, _ = quantized(model, {"x": numbers(2, 20)}, scheme=scheme, group=256)
        assert made.nodes[0].attrs["block_size"] == size


def test_what_gptq_cannot_use_is_named() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["e"], "exp"), helper.make_node("MatMul", ["e", "w"], ["y"], "dense")]
    model = model_of(nodes, {"x": [4, 32]}, ["y"], {"w": numbers(32, 48)})
    with pytest.raises(InvalidConfig, match="infinite") as refused:
        quantized(model, {"x": numbers(4, 32) + np.float32(100)}, scheme="gptq")
    assert "'dense'" in refused.value.__notes__[0] and "keep" in refused.value.__notes__[0]


def test_results_that_are_no_numbers_any_more_are_a_problem() -> None:
    """Also where nothing was asked of them: roots of what was just above zero."""
    x, weights = numbers(4, 32), {"w": numbers(32, 48)}
    weights["b"] = (1e-4 - (x @ weights["w"]).min(axis=0)).astype(np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"], "dense"),
        helper.make_node("Sqrt", ["a"], ["y"], "root"),
    ]
    _, report = quantized(model_of(nodes, {"x": [4, 32]}, ["y"], weights), {"x": x}, scheme="ternary")
    assert report.difference.error == np.inf and "not numbers" in report.problems[0]


def test_a_cosine_is_at_most_one() -> None:
    for seed in range(20):
        large = (np.random.default_rng(seed).standard_normal((4, 33)) * 1e30).astype(np.float32)
        assert difference([[large]], [[large]]).cosine <= 1


def test_layers_are_kept_by_names_that_look_like_patterns() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "dense[0]"),
        helper.make_node("MatMul", ["a", "v"], ["y"], "dense[1]"),
    ]
    model = model_of(nodes, {"x": [4, 32]}, ["y"], {"w": numbers(32, 32), "v": numbers(32, 16)})
    _, report = quantized(model, {"x": numbers(4, 32)}, scheme="int4", keep=("dense[0]",))
    assert [layer.reason for layer in report.layers] == ["asked for", ""]
    assert [layer.error == 0.0 for layer in report.layers] == [True, False]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_sums_of_few_terms_are_not_coded(scheme: str) -> None:
    """With groups filled up and a scale for each, they would take more room than before."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], "few"),
        helper.make_node("Gemm", ["a", "v"], ["y"], "many", transB=1),
    ]
    model = model_of(nodes, {"x": [4, 2]}, ["y"], {"w": numbers(2, 256), "v": numbers(16, 256)})
    made, report = quantized(model, {"x": numbers(4, 2)}, scheme=scheme)
    assert [layer.name for layer in report.layers] == ["many"]
    assert report.bytes_after == made.constant_bytes() < report.bytes_before


def test_sizes_are_compared_with_the_model_as_it_was_given() -> None:
    """Preparing it joins weights that are the same, and makes others of what it folds."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "same"], ["y"], "second"),
    ]
    weights = numbers(64, 64)
    model = model_of(nodes, {"x": [4, 64]}, ["y"], {"w": weights, "same": weights})
    _, report = quantized(model, {"x": numbers(4, 64)}, scheme="int4")
    assert report.bytes_before == 2 * weights.nbytes


@pytest.mark.parametrize("dead", [1, 24])
def test_biases_of_channels_without_weights_are_kept(dead: int) -> None:
    """Any step would do for such weights, but biases are rounded to it."""
    weights, bias = numbers(32, 24), numbers(24)
    weights[:, :dead] = 0.0
    model = model_of(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "dense")], {"x": [4, 32]}, ["y"], {"w": weights, "b": bias}
    )
    x = numbers(4, 32) * 100
    made, _ = quantized(model, {"x": x}, scheme="int8")
    with Session(made, CONFIG) as session:
        found = np.asarray(session.run({"x": x})["y"])
    assert np.abs(found[:, :dead] - bias[:dead]).max() < 0.1 * np.abs(bias[:dead]).max()


def test_means_leave_out_what_is_not_finite() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "dense"),
        helper.make_node("Add", ["a", "b"], ["s"], "bias"),
        helper.make_node("Clip", ["s", "low", "high"], ["y"], "clip"),
    ]
    weights = {"w": np.abs(numbers(32, 24)), "b": numbers(24), "low": np.float32(-1), "high": np.float32(1)}
    model = model_of(nodes, {"x": [1, 4, 32]}, ["y"], weights)
    x = numbers(4, 4, 32)
    x[0, 0, 0] = np.inf
    made, _ = quantized(model, {"x": x}, scheme="int8")
    assert all(np.isfinite(value.const.numpy()).all() for value in made.constants.values())


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
@pytest.mark.parametrize("layer", ["first", "second"])
def test_convolutions_without_numbers_are_named(layer: str, wrong: float) -> None:
    """Also where channels between them are brought to like ranges first."""
    weights = {"first": numbers(16, 8, 3), "second": numbers(16, 16, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "second"], ["y"], "second"),
    ]
    weights[layer][2, 3, 1] = wrong
    model = model_of(nodes, {"x": ["n", 8, 8]}, ["y"], weights)
    data = {"x": numbers(4, 8, 8)}
    with pytest.raises(InvalidConfig, match="infinite") as refused:
        quantized(model, data, scheme="int8")
    assert repr(layer) in refused.value.__notes__[0]
    _, report = quantized(model, data, scheme="int8", keep=(layer,))
    assert [each.reason for each in report.layers if each.name == layer] == ["asked for"]


def test_samples_that_are_infinite_do_not_stop_the_work() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "second"], ["y"], "second"),
    ]
    model = model_of(nodes, {"x": ["n", 8, 8]}, ["y"], {"first": numbers(16, 8, 3), "second": numbers(16, 16, 3)})
    x = numbers(4, 8, 8)
    x[1, 2, 3] = np.inf
    _, report = quantized(model, {"x": x}, scheme="int8")
    assert len(report.layers) == 2 and "not numbers" in report.problems[0]


def test_convolutions_that_int8_codes_are_told_of() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "c")
    model = model_of([node], {"x": ["n", 16, 4]}, ["y"], {"w": numbers(16, 16, 2)})
    with pytest.raises(InvalidConfig, match="of convolutions int8 codes"):
        quantized(model, {"x": numbers(2, 16, 4)}, scheme="int4")


@pytest.mark.parametrize("scheme", ["int8", "gptq"])
def test_an_error_without_a_limit_codes_every_layer(scheme: str) -> None:
    _, report = quantized(tied(), {"x": numbers(4, 32)}, scheme=scheme, max_error=float("inf"))
    assert [layer.scheme for layer in report.layers] == [scheme] * 3 and not report.problems
