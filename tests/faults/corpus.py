"""The models that are mutated: the standard's own small cases, a few written here, the package's own model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ranvier
from tests.conformance.cases import all_cases

MODEL_BYTES = 20_000  # mutations of a larger model mostly hit its weights
INPUT_BYTES = 200_000
_FILE = "corpus.pickle"

FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
functions (float[n] x) => (float[n] y) { h = local.twice(x) y = local.shift <by = 3.0> (h) }
<domain: "local", opset_import: ["" : 21]>
twice (a) => (b) { b = Add(a, a) }
<domain: "local", opset_import: ["" : 21, "local" : 1]>
shift <by> (a) => (b) { c = local.twice(a) v = Constant <value_float: float = @by> () b = Add(c, v) }
"""
NESTED = """
<ir_version: 10, opset_import: ["" : 21]>
nested (float[n] x, int64 steps, bool c) => (float[k] y, float[m, n] all)
{
  y, all = Loop (steps, c, x) <body = outer (int64 i, bool going, float[n] a) => (bool more, float[n] b, float[n] s)
  {
    more = Identity(going)
    b = If (going) <
      then_branch = up () => (float[n] u) { u = Add(a, x) },
      else_branch = down () => (float[n] d) { d = Sub(a, x) }
    >
    s = Scan (b, a) <num_scan_inputs = 1, body = inner (float[n] acc, float e) => (float[n] out, float o)
      { out = Add(acc, e) o = Neg(e) }>
  }>
}
"""
SHAPES = """
<ir_version: 10, opset_import: ["" : 21]>
shapes (float[b, c, h] x, int64[r] target) => (float[?, ?] flat, float[?, ?, ?] padded, float[?] picked)
<int64[1] first = {0}, int64[1] rest = {-1}, int64[6] pads = {0, 1, 0, 0, 1, 2}, float fill = {0.5}>
{
  sizes = Shape(x)
  batch = Gather(sizes, first)
  to = Concat <axis = 0> (batch, rest)
  flat = Reshape(x, to)
  padded = Pad(x, pads, fill)
  line = Reshape(x, rest)
  picked = Gather(line, target)
}
"""


@dataclass(frozen=True)
class Seed:
    """A good model and inputs it takes, in order."""

    name: str
    model: bytes
    inputs: tuple[Any, ...]


def write(folder: Path) -> None:
    """Put all seeds, and the external data one of them needs, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    (folder / "weights.bin").write_bytes(weights.tobytes())
    found = [*_written_here(weights), *_packaged(), *_conformance()]
    (folder / _FILE).write_bytes(pickle.dumps(found))


def read(folder: Path) -> list[Seed]:
    found: list[Seed] = pickle.loads((folder / _FILE).read_bytes())
    return found


def _conformance() -> list[Seed]:
    found: list[Seed] = []
    for case in all_cases():
        if case.kind == "light":
            continue
        model = case.model()
        if model.ByteSize() > MODEL_BYTES:
            continue
        inputs = next(iter(case.data(model)))[0]
        if sum(getattr(x, "nbytes", 0) for x in inputs) <= INPUT_BYTES:
            found.append(Seed(case.name, model.SerializeToString(), tuple(inputs)))
    return found


def _packaged() -> list[Seed]:
    """The digits model of the package, where this build has it."""
    found = sorted(Path(ranvier.__file__).parent.rglob("digits.onnx"))
    return [Seed(path.stem, path.read_bytes(), (np.zeros((1, 64), np.float32),)) for path in found]


def _written_here(weights: np.ndarray[Any, Any]) -> list[Seed]:
    """What the standard's cases lack: functions, nested control flow, shape arithmetic, sparse and external weights."""
    line = np.float32([1, 2, 3])
    cube = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    steps = (line, np.array(2), np.array(True))
    return [
        Seed("functions", _parsed(FUNCTIONS), (line,)),
        Seed("nested", _parsed(NESTED), steps),
        Seed("shapes", _parsed(SHAPES), (cube, np.array([0, 5]))),
        Seed("sparse", _sparse(), ()),
        Seed("external", _external(weights.shape), (np.ones((2, 4), np.float32),)),
        Seed("packed", _inside(weights), (np.ones((2, 4), np.float32),)),
    ]


def _parsed(text: str) -> bytes:
    return onnx.parser.parse_model(text).SerializeToString()


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], **more: Any) -> bytes:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, **more)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()


def _info(name: str, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _sparse() -> bytes:
    values = numpy_helper.from_array(np.float32([7, 9]), "s")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 5]), "i"), [2, 3])
    return _model([helper.make_node("Neg", ["s"], ["y"])], [], [_info("y", 2, 3)], sparse_initializer=[sparse])


def _linear(weights: TensorProto) -> bytes:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="product"), helper.make_node("Relu", ["h"], ["y"])]
    return _model(nodes, [_info("x", "n", 4)], [_info("y", "n", 300)], initializer=[weights])


def _external(shape: tuple[int, ...]) -> bytes:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", str(4 * int(np.prod(shape))))):
        tensor.external_data.add(key=key, value=value)
    return _linear(tensor)


def _inside(weights: np.ndarray[Any, Any]) -> bytes:
    """Weights large enough that the reader leaves them in the file."""
    return _linear(numpy_helper.from_array(weights, "w"))
