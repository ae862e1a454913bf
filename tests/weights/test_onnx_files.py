"""Tensors of ONNX models: as the package ``onnx`` wrote them, found without reading them, and never believed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import SparseTensorProto, TensorProto, helper, numpy_helper

from ranvier.dtypes import DType
from ranvier.errors import IntegrityError, ResourceLimit, WeightError
from ranvier.formats.onnx import read
from ranvier.weights import Checkpoint, MemorySource, Missing, Opening, WeightLoader
from ranvier.weights.blob import Bytes, MemoryBlob
from ranvier.weights.formats import windows
from ranvier.weights.formats.onnx_files import Onnx
from ranvier.weights.stored import Stored
from tests.weights.server import kept, loader, serving

LOADER = WeightLoader(offline=True)
SHAPE = (3, 5)


@pytest.fixture(autouse=True)
def _quick_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is asked for at a time depends on how long it took: here, on no clock."""
    monkeypatch.setattr(windows, "time", SimpleNamespace(monotonic=lambda: 0.0))


class Distant(MemoryBlob):
    """Bytes that are read by ranges, which are noted."""

    near = False

    def __init__(self, data: bytes) -> None:
        super().__init__("model.onnx", data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> Bytes:
        self.ranges.append((start, stop))
        return super().read(start, stop)

    @property
    def fetched(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def model_of(*tensors: TensorProto, nodes: Sequence[onnx.NodeProto] = (), **facts: Any) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", [], [], list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], **facts)


def message_of(*tensors: TensorProto, nodes: Sequence[onnx.NodeProto] = ()) -> bytes:
    data: bytes = model_of(*tensors, nodes=nodes).SerializeToString()
    return data


def opened(data: bytes, **limits: Any) -> Checkpoint:
    return Onnx().open(MemoryBlob("model.onnx", data), Opening(**limits))


def distant(data: bytes) -> tuple[Checkpoint, Distant]:
    blob = Distant(data)
    return Onnx().open(blob, Opening()), blob


def same(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype == object:
        assert got.tolist() == want.tolist()
    else:
        assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


# -- element types ----------------------------------------------------------------------------------------------------

NUMBERS = [dtype for dtype in DType if dtype is not DType.string]


def numbers(dtype: DType, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(dtype.onnx)
    if dtype is DType.bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.bits < 8 and dtype.is_integer:
        low = -(2 ** (dtype.bits - 1)) if dtype.name.startswith("int") else 0
        return rng.integers(low, low + 2**dtype.bits, shape).astype(np.int8).astype(dtype.numpy)
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return rng.integers(limits.min, limits.max, shape, dtype.numpy, endpoint=True)
    if dtype.is_complex:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype.numpy)
    if dtype is DType.float8_e8m0fnu:
        return (2.0 ** rng.integers(-9, 9, shape)).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(dtype.numpy)


def typed(array: np.ndarray[Any, Any], name: str = "w") -> TensorProto:
    """The numbers in the field of their kind instead of raw_data; as the standard says it, not as we read it."""
    dtype = DType(helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor = TensorProto(name=name, data_type=dtype.onnx, dims=array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype.bits in (2, 4):
        tensor.int32_data.extend(numpy_helper.from_array(array).raw_data)
    elif dtype.is_complex:
        parts = flat.view(np.float32 if dtype is DType.complex64 else np.float64).tolist()
        (tensor.float_data if dtype is DType.complex64 else tensor.double_data).extend(parts)
    elif helper.tensor_dtype_to_field(dtype.onnx) == "int32_data" and not dtype.is_integer:
        bits = np.uint16 if dtype.bits == 16 else np.uint8
        tensor.int32_data.extend(flat.view(bits).tolist())
    else:
        getattr(tensor, helper.tensor_dtype_to_field(dtype.onnx)).extend(flat.tolist())
    return tensor


@pytest.mark.parametrize("form", ["raw", "typed"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_element_type(dtype: DType, form: str) -> None:
    tensor = numpy_helper.from_array(numbers(dtype), "w") if form == "raw" else typed(numbers(dtype))
    want = numpy_helper.to_array(tensor)
    same(want, numbers(dtype))
    data = message_of(typed(np.ones(3, np.float32), "before"), tensor, numpy_helper.from_array(np.ones(2), "after"))
    for checkpoint in (opened(data), distant(data)[0]):
        weight = checkpoint["w"]
        assert (weight.info.dtype, weight.info.shape) == (dtype, SHAPE)
        assert weight.info.nbytes == math.ceil(15 * dtype.bits / 8)
        same(weight.read(), want)
        same(weight.read((slice(1, 3, 1), slice(0, 5, 2))), want[1:3, ::2])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [DType.float32, DType.int64, DType.int4, DType.bfloat16, DType.uint2], ids=str)
def test_shapes(dtype: DType, shape: tuple[int, ...]) -> None:
    want = np.ones(shape, dtype.numpy)
    for tensor in (numpy_helper.from_array(want, "w"), typed(want)):
        same(opened(message_of(tensor))["w"].read(), want)


def test_strings() -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.STRING, dims=[2, 2])
    tensor.string_data.extend([b"a", b"", "wörter".encode(), b"\xff"])
    for checkpoint in (opened(message_of(tensor)), distant(message_of(tensor))[0]):
        assert checkpoint["w"].info.dtype is DType.string and checkpoint["w"].info.nbytes == 9
        assert checkpoint["w"].read().tolist() == [["a", ""], ["wörter", "�"]]


# -- how fields are written -------------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def piece(field: int, content: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(content)) + content


def single(field: int, value: int) -> bytes:
    return number(field << 3) + number(value)


def by_hand(*tensors: bytes, field: int = 5) -> bytes:
    """A model whose graph has these messages in one of its fields: 5 are initializers."""
    return single(1, 10) + piece(7, b"".join(piece(field, tensor) for tensor in tensors))


def tensor(content: bytes, dtype: int = 1, dims: Sequence[int] = (3,), name: bytes = b"w") -> bytes:
    return b"".join(single(1, d) for d in dims) + single(2, dtype) + content + piece(8, name)


FLOATS = np.array([1.5, -2.25, 3e9], np.float32)
INTS = np.array([-1, 300, 7], np.int64)
WRITTEN: dict[str, tuple[bytes, np.ndarray[Any, Any]]] = {
    "floats in pieces": (tensor(piece(4, FLOATS[:1].tobytes()) + piece(4, FLOATS[1:].tobytes())), FLOATS),
    "floats one by one": (tensor(b"".join(number(4 << 3 | 5) + x.tobytes() for x in FLOATS)), FLOATS),
    "floats both ways": (tensor(piece(4, FLOATS[:2].tobytes()) + number(4 << 3 | 5) + FLOATS[2:].tobytes()), FLOATS),
    "ints one by one": (tensor(b"".join(single(7, int(x)) for x in INTS), 7), INTS),
    "ints in pieces": (tensor(piece(7, number(-1) + number(300)) + piece(7, b"") + piece(7, number(7)), 7), INTS),
    "int8 one by one": (tensor(b"".join(single(5, x) for x in (1, -3, 4)), 3), np.array([1, -3, 4], np.int8)),
    "packed sizes": (piece(1, number(1) + number(3)) + tensor(piece(9, FLOATS.tobytes()), dims=()), FLOATS[None]),
    "name first": (piece(8, b"w") + piece(9, FLOATS.tobytes()) + single(2, 1) + single(1, 3), FLOATS),
    "said twice": (tensor(single(2, 7) + piece(9, b"") + single(2, 1) + piece(9, FLOATS.tobytes())), FLOATS),
    "unknown fields": (tensor(piece(99, b"x" * 50) + single(98, 5) + piece(9, FLOATS.tobytes())), FLOATS),
    "a long key": (single(1, 3) + b"\x90\0\x01" + piece(8, b"w") + piece(9, FLOATS.tobytes()), FLOATS),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_it(name: str) -> None:
    message, want = WRITTEN[name]
    same(numpy_helper.to_array(TensorProto.FromString(message)), want)
    same(opened(by_hand(message))["w"].read(), want)
    same(distant(by_hand(message))[0]["w"].read(), want)


def test_packed_floats_are_read_in_place() -> None:
    weights = opened(message_of(typed(numbers(DType.float32)), typed(numbers(DType.complex128), "c")))
    assert all(isinstance(weight, Stored) for weight in weights.values())


def test_graph_in_two_parts() -> None:
    data = by_hand(tensor(piece(9, bytes(12)))) + by_hand(tensor(piece(9, bytes(12)), name=b"v"))
    assert list(opened(data)) == ["w", "v"]


# -- what counts as a tensor ------------------------------------------------------------------------------------------


def sparse(name: str) -> SparseTensorProto:
    values = numpy_helper.from_array(np.array([5, 7], np.float32), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 5], np.int64), "i"), [2, 3])


def various() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["inner.out"])],
        "body",
        [],
        [helper.make_tensor_value_info("inner.out", 1, [1])],
        [numpy_helper.from_array(np.ones(1, np.float32), "inner")],
    )
    constants: dict[str, Any] = {
        "value": numpy_helper.from_array(np.arange(4, dtype=np.int16), "other name"),
        "sparse_value": sparse(""),
        "value_float": 2.5,
        "value_floats": [1.5, -2.0],
        "value_int": -7,
        "value_ints": [1, 2, 1 << 40],
        "value_string": "text",
        "value_strings": ["a", "b"],
    }
    nodes = [helper.make_node("Constant", [], [f"c.{name}"], **{name: value}) for name, value in constants.items()]
    nodes += [
        helper.make_node("Constant", [], ["c.domain"], domain="ai.onnx", value_int=3),
        helper.make_node("Constant", [], ["elsewhere"], domain="com.example", value_int=3),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=body, else_branch=body),
    ]
    model = model_of(
        numpy_helper.from_array(np.array(True), "yes"),
        numpy_helper.from_array(np.array([[1, 2]], np.float32), "w"),
        typed(np.array([3, -4], np.int8), "q"),
        nodes=nodes,
        producer_name="somebody",
        producer_version="3",
        ir_version=10,
    )
    model.graph.sparse_initializer.append(sparse("s"))
    model.graph.output.append(helper.make_tensor_value_info("chosen", 1, [1]))
    model.opset_import.append(helper.make_opsetid("com.example", 2))
    helper.set_model_props(model, {"labels": "cat,dog"})
    return model


def test_the_same_tensors_as_those_of_the_graph() -> None:
    data = various().SerializeToString()
    graph = read(data)
    for checkpoint in (opened(data), distant(data)[0]):
        assert set(checkpoint) == set(graph.constants)
        for name, value in graph.constants.items():
            assert value.const is not None
            assert checkpoint[name].info.dtype is value.const.dtype
            same(checkpoint[name].read(), value.const.numpy())
        assert checkpoint.notes == {
            "opsets": graph.opsets,
            "ir_version": 10,
            "producer_name": "somebody",
            "producer_version": "3",
            "metadata_props": {"labels": "cat,dog"},
        }


def test_initializers_that_may_be_overridden_are_weights() -> None:
    model = model_of(numpy_helper.from_array(FLOATS, "w"))
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [3]))
    same(opened(model.SerializeToString())["w"].read(), FLOATS)


def test_before_the_standard_had_versions() -> None:
    assert opened(by_hand()[2:]).notes == {"opsets": {"": 1}}


# -- external data ----------------------------------------------------------------------------------------------------


def outside(location: str, name: str = "w", count: int = 8, **entries: Any) -> TensorProto:
    found = TensorProto(name=name, data_type=1, dims=[count], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        found.external_data.add(key=key, value=str(value))
    return found


def test_external_data(tmp_path: Path) -> None:
    arrays = {str(dtype): numbers(dtype, (7, 9)) for dtype in NUMBERS}
    model = model_of(*(numpy_helper.from_array(array, name) for name, array in arrays.items()))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert "m.data" in str((tmp_path / "m.onnx").read_bytes())
    for name, array in arrays.items():
        same(LOADER.load(tmp_path / "m.onnx", name), array)
        same(LOADER.load(tmp_path / "m.onnx", name, part=(slice(2, 5), slice(1, 9, 3))), array[2:5, 1:9:3])


def test_external_data_in_a_folder_and_with_a_checksum(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d").write_bytes(b"head" + array.tobytes())
    digest = hashlib.sha1(array.tobytes(), usedforsecurity=False).hexdigest()
    path = tmp_path / "m.onnx"
    path.write_bytes(message_of(outside("sub/d", offset=4, length=32, checksum=digest.upper())))
    same(LOADER.load(path, "w"), array)
    same(LOADER.load(path, "w", part=slice(2, 4)), array[2:4])
    (tmp_path / "sub" / "d").write_bytes(b"head" + array[::-1].tobytes())
    with pytest.raises(IntegrityError, match="checksum"):
        LOADER.load(path, "w")


def test_external_data_of_a_cache_by_content(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "12").write_bytes(message_of(outside("m.data")))
    (blobs / "34").write_bytes(bytes(32))
    (snapshot / "m.onnx").symlink_to("../../blobs/12")
    (snapshot / "m.data").symlink_to("../../blobs/34")
    assert LOADER.load(snapshot / "m.onnx", "w").tolist() == [0] * 8


@pytest.mark.parametrize(
    "location",
    [
        "",
        "../secret",
        "sub/../../secret",
        "{folder}/secret",
        "a\0",
        "link",
        "sub\\..\\..\\secret",
        "\\secret",
        "x" * 999,
    ]
    + ["//host/secret", ".", "absent", "sub/absent", "sub"],
)
def test_external_data_leads_nowhere_else(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(32))
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    (inner / "link").symlink_to("../secret")
    (inner / "m.onnx").write_bytes(message_of(outside(location.replace("{folder}", str(tmp_path)))))
    with pytest.raises(WeightError):
        LOADER.metadata(inner / "m.onnx")
    with serving(m__onnx=(inner / "m.onnx").read_bytes(), secret=bytes(32)) as server:
        with pytest.raises(WeightError):
            loader(tmp_path).load(server.url + "/m.onnx", "w")
        assert not any("secret" in path for _, path, _ in server.requests)


@pytest.mark.parametrize("location", ["absent", "sub/absent", "no folder/absent"])
def test_external_data_that_is_absent(tmp_path: Path, location: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "m.onnx").write_bytes(message_of(outside(location)))
    told = f"^tensor 'w': external file '{location}' cannot be had: .*([Nn]o such file|there is no file '{location}')"
    with pytest.raises(WeightError, match=told):
        LOADER.metadata(tmp_path / "m.onnx")
    told = f"^tensor 'w': external file '{location}' cannot be had: .*no such file"
    with serving(m__onnx=(tmp_path / "m.onnx").read_bytes()) as server, pytest.raises(Missing, match=told):
        loader(tmp_path).load(server.url + "/m.onnx", "w")


@pytest.mark.parametrize(
    "entries",
    [{"offset": 8}, {"offset": -8}, {"length": 16}, {"offset": "x"}, {"length": -4}, {"offset": 1 << 80}]
    + [{"length": "9" * 5000}, {"offset": "9" * 4300}, {"length": "9" * 21}],
    ids=str,
)
def test_external_places_that_are_none(tmp_path: Path, entries: dict[str, Any]) -> None:
    (tmp_path / "d").write_bytes(bytes(32))
    (tmp_path / "m.onnx").write_bytes(message_of(outside("d", **entries)))
    with pytest.raises(WeightError):
        LOADER.metadata(tmp_path / "m.onnx")
    with serving(m__onnx=(tmp_path / "m.onnx").read_bytes(), d=bytes(32)) as server, pytest.raises(WeightError):
        loader(tmp_path).load(server.url + "/m.onnx", "w")


def test_external_data_of_bytes_in_memory() -> None:
    with pytest.raises(WeightError, match="no other files"):
        LOADER.metadata(MemorySource(message_of(outside("d")), "onnx"))


def test_the_package_opens_no_files() -> None:
    """A location that only the package takes for external: it would open the file wherever we are."""
    entry = piece(13, piece(1, b"location") + piece(2, b"pyproject.toml"))
    message = tensor(entry + single(14, (1 << 32) + 1) + piece(7, bytes(3)), 7)
    assert TensorProto.FromString(message).data_location == TensorProto.EXTERNAL
    with pytest.raises(WeightError, match="in two ways"):
        opened(by_hand(message))["w"].read()


# -- far away ---------------------------------------------------------------------------------------------------------


def layers(count: int, large: int, small: int, folded: bool = False) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors, nodes = [], []
    for k in range(count):
        weight = numpy_helper.from_array(rng.standard_normal((large // 1024, 256)).astype(np.float32), f"{k}.weight")
        if folded:
            nodes.append(helper.make_node("Constant", [], [weight.name], value=weight))
        else:
            tensors.append(weight)
        tensors.append(numpy_helper.from_array(rng.standard_normal(small // 4).astype(np.float32), f"{k}.bias"))
        nodes.append(helper.make_node("Gemm", [f"x{k}", f"{k}.weight", f"{k}.bias"], [f"x{k + 1}"]))
    return model_of(*tensors, nodes=nodes)


@pytest.mark.parametrize("folded", [False, True], ids=["initializers", "Constant nodes"])
def test_metadata_costs_a_request_for_each_large_tensor(tmp_path: Path, folded: bool) -> None:
    data = layers(20, 1 << 19, 1 << 10, folded).SerializeToString()
    with serving(m__onnx=data) as server:
        found = loader(tmp_path).metadata(server.url + "/m.onnx")
        assert len(found.tensors) == 40 and found.nbytes == 20 * ((1 << 19) + (1 << 10))
        assert len(server.requests) <= 20 + 3
        assert server.sent <= len(server.requests) * (1 << 16)


def test_small_tensors_cost_no_request_each(tmp_path: Path) -> None:
    data = layers(300, 1 << 13, 1 << 8).SerializeToString()  # 2.5 MB
    with serving(m__onnx=data) as server:
        assert len(loader(tmp_path).metadata(server.url + "/m.onnx").tensors) == 600
        assert len(server.requests) <= 10


def test_a_part_costs_the_part(tmp_path: Path) -> None:
    model = layers(2, 1 << 20, 1 << 10)
    data = model.SerializeToString()
    want = numpy_helper.to_array(model.graph.initializer[2])
    with serving(m__onnx=data) as server:
        checkpoint = loader(tmp_path).open(server.url + "/m.onnx")
        before = server.sent
        same(checkpoint["1.weight"].read((slice(100, 110, 1), slice(0, 256, 1))), want[100:110])
        assert server.sent - before == 10 * 256 * 4


def test_external_data_far_away(tmp_path: Path) -> None:
    model = layers(3, 1 << 18, 1 << 10)
    wanted = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    files = {f"m__{end}": (tmp_path / f"m.{end}").read_bytes() for end in ("onnx", "data")}
    with serving(**files) as server:
        url = server.url + "/m.onnx"
        assert len(loader(tmp_path).metadata(url).tensors) == 6
        assert {path for _, path, _ in server.requests} == {"/m.onnx"} and server.sent < 1 << 15
        same(loader(tmp_path).load(url, "2.weight", part=slice(0, 4)), wanted["2.weight"][:4])
        assert server.sent < 1 << 17
        for name, got in loader(tmp_path).load_many(url).items():
            same(got, wanted[name])


def test_external_data_is_fetched_with_its_model(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32)
    first, second = outside("m.data", "a"), outside("sub/ö 2.data", "b")
    files = {
        "/x/m.onnx": message_of(first, second),
        "/x/m.data": array.tobytes(),
        "/x/sub/ö 2.data": array[::-1].tobytes(),
    }
    with serving() as server:
        server.files = {urllib.parse.quote(name): data for name, data in files.items()}
        url = server.url + "/x/m.onnx"
        loader(tmp_path).preload(url)
        asked = len(server.requests)
        found = loader(tmp_path, offline=True).load_many(url)
        assert len(server.requests) == asked and len(kept(tmp_path)) == 3
    same(found["a"], array)
    same(found["b"], array[::-1])


@pytest.mark.parametrize(
    "model", [b"no model", b"\x3a\x7f", message_of(outside("../x"))], ids=["no", "cut off", "leads out"]
)
def test_what_is_no_sound_model_is_fetched_all_the_same(tmp_path: Path, model: bytes) -> None:
    with serving(m__onnx=model) as server:
        (path,) = loader(tmp_path).preload(server.url + "/m.onnx")
        assert path is not None and path.read_bytes() == model
        with pytest.raises(WeightError):
            loader(tmp_path).metadata(server.url + "/m.onnx")


# -- near -------------------------------------------------------------------------------------------------------------


def test_tensors_of_a_file_are_mapped(tmp_path: Path) -> None:
    array = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    onnx.save(model_of(numpy_helper.from_array(array, "w")), tmp_path / "m.onnx")
    weight = LOADER.open(tmp_path / "m.onnx")["w"]
    assert isinstance(weight, Stored)
    got = weight.read()
    same(got, array)
    assert np.shares_memory(got, weight.blob.read(0, weight.blob.size)) and not got.flags.writeable


def test_operators_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model_of(numpy_helper.from_array(FLOATS, "w"), typed(np.arange(3), "i")), path)
    program = (
        "import sys; from ranvier.weights import WeightLoader; loader = WeightLoader(offline=True)\n"
        f"found = loader.metadata({str(path)!r}); loader.load({str(path)!r}, 'w')\n"
        "assert set(found.tensors) == {'w', 'i'} and 'onnx' not in sys.modules, 'the package'\n"
        f"loader.load({str(path)!r}, 'i')\n"
        "assert not [name for name in sys.modules if name.startswith(('ranvier.ops', 'ranvier.graph'))], 'operators'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- nothing is believed ----------------------------------------------------------------------------------------------

RAW = piece(9, bytes(12))
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no graph"),
    "no graph": (single(1, 8), "no graph"),
    "a number that does not end": (by_hand(tensor(RAW))[:-3] + b"\xff\xff\xff", "no ONNX model"),
    "a number without end": (b"\x08" + b"\x80" * 40, "does not end"),
    "length beyond the file": (number(7 << 3 | 2) + number(1 << 40), "passes the end"),
    "length beyond all": (number(7 << 3 | 2) + number(-1), "passes the end"),
    "length beyond the parent": (by_hand(single(1, 3) + b"\x4a\x7f") + bytes(200), "passes the end"),
    "a group": (by_hand(b"\x0b\x0c"), "wire type 3"),
    "the end of a group": (b"\x0c" + by_hand(), "wire type 4"),
    "no such wire type": (by_hand(b"\x0f"), "wire type 7"),
    "field number 0": (b"\x00\x00" + by_hand(tensor(RAW)), "field number 0"),
    "cut in a double": (by_hand(b"\x51\0\0"), "passes the end"),
    "negative size": (by_hand(tensor(RAW, dims=[-3])), "impossible shape"),
    "size that overflows": (by_hand(tensor(RAW, dims=[1 << 62, 1 << 62])), "tensor_bytes"),
    "empty, but too large": (by_hand(tensor(b"", dims=[0, 1 << 62])), "impossible shape"),
    "too many axes": (by_hand(tensor(RAW, dims=[1] * 65)), "65 dimensions"),
    "far too many axes": (by_hand(piece(1, b"\1" * 100_000) + tensor(RAW)), "65 dimensions"),
    "less data": (by_hand(tensor(piece(9, bytes(8)))), "takes 12 bytes, its data has 8"),
    "more data": (by_hand(tensor(piece(9, bytes(16)))), "takes 12 bytes, its data has 16"),
    "less of 4 bits": (by_hand(tensor(piece(9, bytes(1)), 22)), "takes 2 bytes, its data has 1"),
    "no data": (by_hand(tensor(b"")), "takes 3 values, its data has 0"),
    "fewer floats": (by_hand(tensor(piece(4, bytes(8)))), "takes 3 values, its data has 2"),
    "half a float": (by_hand(tensor(piece(4, bytes(14)))), "14 bytes of numbers of 4"),
    "too few bytes of numbers": (by_hand(tensor(piece(7, bytes(2)), 7)), "has 1 to 2"),
    "too many numbers": (by_hand(tensor(piece(7, bytes(31)), 7)), "has 4 to 31"),
    "numbers of another kind": (by_hand(tensor(piece(7, bytes(3)))), "its data has 0"),
    "fewer strings": (by_hand(tensor(piece(6, b"a"), 8)), "takes 3 values, its data has 1"),
    "strings as raw data": (by_hand(tensor(piece(9, bytes(24)), 8)), "strings cannot"),
    "no type": (by_hand(tensor(RAW, 0)), "unknown element type 0"),
    "unknown type": (by_hand(tensor(RAW, 77)), "unknown element type 77"),
    "a type below zero": (by_hand(tensor(RAW, -1)), "unknown element type -1"),
    "no name": (by_hand(tensor(RAW, name=b"")), "has no name"),
    "a name that is no text": (by_hand(tensor(RAW, name=b"\xff")), "is no text"),
    "twice": (by_hand(tensor(RAW), tensor(RAW)), "occurs twice"),
    "segments": (by_hand(tensor(RAW + piece(3, b""))), "segments"),
    "sparse without values": (by_hand(single(3, 4), field=15), "no values"),
    "sparse and immense": (by_hand(piece(1, tensor(RAW)) + single(3, 1 << 50), field=15), "tensor_bytes"),
    "sparse with values twice": (by_hand(piece(1, tensor(RAW)) * 2, field=15), "twice"),
    "a Constant without value": (by_hand(piece(2, b"c") + piece(4, b"Constant"), field=1), "has one value"),
    "a Constant of what is none": (
        by_hand(piece(2, b"c") + piece(4, b"Constant") + piece(5, piece(1, b"val")), field=1),
        "has no value",
    ),
    "a Constant of another type": (
        by_hand(piece(2, b"c") + piece(4, b"Constant") + piece(5, piece(1, b"value_int") + single(20, 4)), field=1),
        "cannot be decoded",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_models_that_are_none(name: str) -> None:
    data, message = BAD[name]
    for blob in (MemoryBlob("model.onnx", data), Distant(data)):
        with pytest.raises((WeightError, ResourceLimit), match=message):
            Onnx().open(blob, Opening())


@pytest.mark.parametrize("kind", ["near", "far"])
def test_no_more_is_looked_at_than_allowed(kind: str) -> None:
    cases = {
        "fields": by_hand(single(99, 0) * 50_000),
        "tensors": by_hand(*(tensor(b"", dims=[0], name=b"%d" % k) for k in range(1000))),
        "a name": by_hand(tensor(RAW, name=b"n" * 100_000)),
        "notes": by_hand() + piece(14, piece(1, b"k") + piece(2, b"v" * 100_000)),
        "numbers": by_hand(b"".join(tensor(b"", dims=[1] * 60)[:-3] for _ in range(2000))),
    }
    for data in cases.values():
        blob = MemoryBlob("m", data) if kind == "near" else Distant(data)
        with pytest.raises(WeightError, match="a header of 65536 bytes"):
            Onnx().open(blob, Opening(header_bytes=1 << 16))


def test_no_more_requests_than_allowed() -> None:
    data = by_hand(*(tensor(piece(9, bytes(1 << 17)), 2, [1 << 17], b"%d" % k) for k in range(50)))
    assert len(Onnx().open(Distant(data), Opening(header_bytes=1 << 17))) == 50
    with pytest.raises(WeightError, match="too many places"):
        Onnx().open(Distant(data), Opening(header_bytes=1 << 16))


def test_deep_nesting() -> None:
    graph = b""
    for _ in range(2000):  # a node whose attribute is a graph with a node ...
        graph = piece(1, piece(4, b"If") + piece(5, piece(1, b"g") + piece(6, graph)))
    assert len(opened(single(1, 8) + piece(7, graph + piece(5, tensor(RAW))))) == 1


def test_sparse_indices_outside(tmp_path: Path) -> None:
    model = model_of()
    model.graph.sparse_initializer.append(sparse("s"))
    model.graph.sparse_initializer[0].indices.CopyFrom(numpy_helper.from_array(np.array([1, 60], np.int64)))
    with pytest.raises(WeightError, match="indices do not fit"):
        opened(model.SerializeToString())["s"].read()


@pytest.fixture(scope="module")
def sound() -> bytes:
    model = various()
    model.graph.initializer.append(outside("d"))
    model.graph.initializer[-1].name = "e"
    for dtype in (DType.int4, DType.bfloat16, DType.uint64, DType.float64):
        model.graph.initializer.append(typed(numbers(dtype), str(dtype)))
    data: bytes = model.SerializeToString()
    return data


def attempt(data: bytes, far: bool) -> None:
    """All of it is read, or a typed error says why not."""
    blob = Distant(data) if far else MemoryBlob("model.onnx", data)
    opening = Opening(lambda name: MemoryBlob(name, bytes(32)), tensor_bytes=1 << 24)
    with contextlib.suppress(WeightError, ResourceLimit):
        for weight in Onnx().open(blob, opening).values():
            with contextlib.suppress(WeightError, ResourceLimit):
                assert weight.read().shape == weight.info.shape


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**32), far=st.booleans())
def test_bytes_changed(sound: bytes, seed: int, far: bool) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(sound)
    for _ in range(int(rng.integers(1, 6))):
        place = int(rng.integers(0, len(data)))
        if rng.integers(3):
            data[place] ^= 1 << int(rng.integers(8))
        else:
            data[place] = int(rng.integers(256))
    attempt(bytes(data), far)


def test_cut_off_anywhere(sound: bytes) -> None:
    for stop in range(len(sound)):
        attempt(sound[:stop], far=bool(stop % 2))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), far=st.booleans())
def test_any_bytes(data: bytes, far: bool) -> None:
    attempt(data, far)
    attempt(by_hand(data), far)
    attempt(by_hand(tensor(data)), far)
