"""The test cases that the onnx package carries: a model, inputs, expected outputs, tolerances."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, numpy_helper

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")

# Cases nobody can pass, or not yet; each with its reason. Everything else must pass.
RANDOM = "draws random numbers: the expected output is one draw of another generator"
LEFT_OUT = {
    "test_bernoulli": RANDOM,
    "test_bernoulli_double": RANDOM,
    "test_bernoulli_double_expanded": RANDOM,
    "test_bernoulli_expanded": RANDOM,
    "test_bernoulli_seed": RANDOM,
    "test_bernoulli_seed_expanded": RANDOM,
}
WAITING: dict[str, str] = {}


@dataclass(frozen=True)
class Case:
    """One case; the data is read when it is asked for."""

    name: str
    kind: str
    rtol: float
    atol: float
    source: Any

    def model(self) -> ModelProto:
        if self.kind == "light":
            return onnx.load(_light_path(self.source))
        if self.source.model is not None:
            return self.source.model
        return onnx.load(Path(self.source.model_dir) / "model.onnx")

    def data(self, model: ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
        """(inputs, expected outputs) of every data set."""
        if self.kind == "light":
            yield _light_data(self.source, model)
        elif self.source.data_sets is not None:
            for inputs, outputs in self.source.data_sets:
                yield [_value(x) for x in inputs], [_value(x) for x in outputs]
        else:
            for folder in sorted(Path(self.source.model_dir).glob("test_data_set*")):
                yield _stored(folder, "input", model.graph.input), _stored(folder, "output", model.graph.output)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Every case of the installed onnx package but the random ones, in a fixed order."""
    from onnx.backend.test.loader import load_model_tests

    found: list[Case] = []
    for kind in KINDS:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            loaded = load_model_tests(kind="real" if kind == "light" else kind)
        for case in loaded:
            if kind == "light" and "light" not in (case.url or ""):
                continue
            if case.name not in LEFT_OUT:
                found.append(Case(case.name, kind, case.rtol, case.atol, case))
    return tuple(sorted(found, key=lambda c: (KINDS.index(c.kind), c.name)))


def check(outputs: list[Any], expected: list[Any], case: Case) -> None:
    """Strict: the same structure, element types and shapes; values within the case's own tolerance."""
    assert len(outputs) >= len(expected), f"{len(outputs)} outputs, expected {len(expected)}"
    for k, (got, want) in enumerate(zip(outputs, expected)):
        same(got, want, case.rtol, case.atol, f"output {k}")


def same(got: Any, want: Any, rtol: float, atol: float, what: str) -> None:
    if want is None:
        assert got is None, f"{what}: expected nothing, got {type(got).__name__}"
        return
    if isinstance(want, list | tuple):
        assert isinstance(got, list | tuple) and len(got) == len(want), f"{what}: expected {len(want)} elements"
        for k, (a, b) in enumerate(zip(got, want)):
            same(a, b, rtol, atol, f"{what}[{k}]")
        return
    if isinstance(want, dict):
        assert isinstance(got, dict) and got.keys() == want.keys(), f"{what}: other keys"
        for key in want:
            np.testing.assert_allclose(got[key], want[key], rtol=rtol, atol=atol)
        return
    want = np.asarray(want)
    assert isinstance(got, np.ndarray), f"{what}: expected an array, got {type(got).__name__}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if want.dtype == object:
        np.testing.assert_array_equal(got, want)
        return
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    if want.dtype.kind not in "biufc":  # a type of ml_dtypes: compare as float32
        if want.dtype.name == "bfloat16":
            rtol = max(rtol, 2**-6)  # two units in the last place, as the standard's own runner allows
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=what)


def _value(x: Any) -> Any:
    if isinstance(x, TensorProto):
        return _strings(numpy_helper.to_array(x))
    if isinstance(x, SequenceProto):
        return numpy_helper.to_list(x)
    if isinstance(x, OptionalProto):
        return numpy_helper.to_optional(x)
    return _strings(x) if isinstance(x, np.ndarray) else x


def _strings(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "SUO":
        return array
    flat = [s.decode() if isinstance(s, bytes) else str(s) for s in array.ravel().tolist()]
    out = np.empty(len(flat), dtype=object)
    out[:] = flat
    return out.reshape(array.shape)


def _stored(folder: Path, prefix: str, infos: Any) -> list[Any]:
    found: list[Any] = []
    for k in range(len(list(folder.glob(f"{prefix}_*.pb")))):
        kind = infos[k].type.WhichOneof("value")
        message = {"sequence_type": SequenceProto, "optional_type": OptionalProto}.get(kind, TensorProto)()
        message.ParseFromString((folder / f"{prefix}_{k}.pb").read_bytes())
        found.append(_value(message))
    return found


def _light_path(source: Any) -> Path:
    return Path(onnx.__file__).parent.parent / source.url


def _light_data(source: Any, model: ModelProto) -> tuple[list[Any], list[Any]]:
    """Ramps as inputs, as the standard's runner makes them; expected outputs lie beside the model."""
    defaults = {i.name for i in model.graph.initializer}
    inputs = []
    for info in model.graph.input:
        if info.name not in defaults:
            shape = tuple(d.dim_value or 1 for d in info.type.tensor_type.shape.dim)
            count = int(np.prod(shape))
            inputs.append((np.arange(count).reshape(shape) / count).astype(np.float32))
    stem = _light_path(source).with_suffix("")
    outputs = []
    for k in range(len(model.graph.output)):
        tensor = TensorProto()
        tensor.ParseFromString(stem.with_name(f"{stem.name}_output_{k}.pb").read_bytes())
        outputs.append(numpy_helper.to_array(tensor))
    return inputs, outputs
