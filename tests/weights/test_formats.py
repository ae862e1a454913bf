"""Every format against code that is not ours, where PyPI has some."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, NotSupported, WeightError
from ranvier.weights import (
    Cast,
    FileSource,
    MemorySource,
    Reshape,
    Slice,
    Transpose,
    WeightLoader,
    register_format,
    save_safetensors,
)
from ranvier.weights.formats.safetensors import TYPES

DATA = Path(__file__).parent / "data"
LOADER = WeightLoader(offline=True)


def some(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 5).astype(dtype)


# -- safetensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_safetensors_both_ways(tmp_path: Path, dtype: str) -> None:
    arrays = {"a": some((3, 4), dtype), "b": some((), dtype), "empty": some((0, 5), dtype)}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", {"made": "by them"})
    found = LOADER.load_many(tmp_path / "theirs.safetensors")
    assert LOADER.metadata(tmp_path / "theirs.safetensors").notes == {"made": "by them"}
    save_safetensors(tmp_path / "ours.safetensors", arrays, {"made": "by us"})
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        np.testing.assert_array_equal(theirs[name], array)
        assert found[name].dtype == theirs[name].dtype == array.dtype


@pytest.mark.parametrize("dtype", sorted((d for d in TYPES.values() if not d.is_packed), key=str))
def test_safetensors_keeps_every_type(tmp_path: Path, dtype: DType) -> None:
    array = some((5, 3), dtype.numpy)
    save_safetensors(tmp_path / "m.safetensors", {"x": array})
    found = LOADER.load(tmp_path / "m.safetensors", "x")
    assert found.dtype == dtype.numpy and found.tobytes() == array.tobytes()


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_safetensors_of_any_names_and_shapes(shapes: dict[str, list[int]]) -> None:
    arrays = {name: some(tuple(shape), np.float32) for name, shape in shapes.items() if name != "__metadata__"}
    data = safetensors.numpy.save(arrays)
    found = LOADER.load_many(MemorySource(data, "safetensors"))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_mapped_not_copied(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"x": some((64, 64), np.float32)})
    found = LOADER.load(tmp_path / "m.safetensors", "x")
    assert not found.flags.owndata and not found.flags.writeable


def test_shards(tmp_path: Path) -> None:
    arrays = {f"layer.{k}": some((k + 1, 3), np.float32, k) for k in range(5)}
    places = {name: f"model-{k % 2}.safetensors" for k, name in enumerate(arrays)}
    for file in set(places.values()):
        save_safetensors(tmp_path / file, {n: arrays[n] for n in arrays if places[n] == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    found = LOADER.load_many(index)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    index.write_text(json.dumps({"weight_map": {"layer.9": "model-0.safetensors"}}))
    with pytest.raises(WeightError, match=r"no tensor 'layer.9' \(did you mean"):
        LOADER.metadata(index)


def test_shards_of_pytorch(tmp_path: Path) -> None:
    for name in ("archive.pt", "legacy.pth"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    expected = LOADER.load_many(DATA / "archive.pt")
    places = {name: ("archive.pt", "legacy.pth")[k % 2] for k, name in enumerate(expected)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = LOADER.load_many(index)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-2-of-2.safetensors"}}))
    with pytest.raises(WeightError, match=r"cannot open .*m-2-of-2\.safetensors.*No such file"):
        LOADER.metadata(index)


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, d in TYPES.items() if d.is_packed])
def test_safetensors_of_packed_elements(name: str, dtype: DType) -> None:
    codes = np.random.default_rng(2).integers(0, 2**dtype.bits, (4, 24)).astype(np.uint8)
    expected = codes.view(dtype.numpy).astype(np.float32)
    bits = (codes.reshape(-1, 1) >> np.arange(dtype.bits)) & 1
    data = np.packbits(bits.reshape(-1), bitorder="little").tobytes()
    header = json.dumps({"x": {"dtype": name, "shape": [4, 24], "data_offsets": [0, len(data)]}}).encode()
    source = MemorySource(len(header).to_bytes(8, "little") + header + data, "safetensors")
    for part in (None, slice(1, 3), (slice(1, 4, 2), slice(3, 20, 5)), (slice(None), slice(5, 6)), slice(2, 2)):
        got = LOADER.load(source, "x", part=part)
        np.testing.assert_array_equal(got.astype(np.float32), expected if part is None else expected[part])


def test_a_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"a": np.ones(2)})
    opened = LOADER.open(tmp_path / "m.safetensors")
    assert opened.get("b") is None and opened.get("a") is opened["a"]
    assert list(LOADER.load_many(tmp_path / "m.safetensors", "a")) == ["a"]


# -- NumPy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i2", ">i8", "u1", "?", "<c8"])
def test_npy(tmp_path: Path, dtype: str, order: Any) -> None:
    array = np.asarray(some((4, 3, 2), np.float64).astype(dtype), order=order)
    np.save(tmp_path / "x.npy", array)
    found = LOADER.load(tmp_path / "x.npy")
    np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(LOADER.load(tmp_path / "x.npy", part=(slice(1, 3), slice(0, 3, 2))), array[1:3, ::2])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    arrays = {"a": some((100, 7), np.float32), "b/c": some((3,), np.int32), "d": np.zeros((300, 300))}
    save(tmp_path / "m.npz", **arrays)
    found = LOADER.load_many(tmp_path / "m.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert LOADER.metadata(tmp_path / "m.npz").tensors["a"].shape == (100, 7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_npy_of_types_that_numpy_does_not_know(tmp_path: Path, dtype: str) -> None:
    array = some((3, 4), DType[dtype].numpy)
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", a=array, b=np.ones(3))
    found = LOADER.load(tmp_path / "x.npy", dtype=dtype)
    assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
    both = LOADER.load_many(tmp_path / "x.npz", dtype=dtype)
    assert both["a"].tobytes() == array.tobytes() and both["b"].dtype == np.float64
    with pytest.raises(WeightError, match="option dtype"):
        LOADER.load(tmp_path / "x.npy")
    with pytest.raises(WeightError, match="bytes for each element; float64"):
        LOADER.load(tmp_path / "x.npy", dtype="float64")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_single_number_of_an_archive_stays_an_array(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "m.npz", a=np.float32(2.5))
    for steps in (
        [],
        [Slice(...)],
        [Cast("float64"), Slice(())],
        [Reshape((1, 1)), Transpose(), Reshape(()), Slice(())],
    ):
        found = LOADER.load(tmp_path / "m.npz", "a", *steps)
        assert isinstance(found, np.ndarray) and found.shape == () and found == 2.5


def test_npz_without_its_name(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3))
    assert LOADER.load(buffer.getvalue()).tolist() == [0, 1, 2]


# -- PyTorch: files that torch 2.13 wrote (tools/make_torch_fixtures.py) ---------------------------------------------


@pytest.mark.parametrize("name", ["archive.pt", "legacy.pth"])
def test_pytorch(name: str) -> None:
    expected = dict(np.load(DATA / "torch.npz"))
    found = LOADER.load_many(DATA / name)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        got = found[key]
        if got.dtype == ml_dtypes.bfloat16:
            got = got.astype(np.float32)
        np.testing.assert_array_equal(got, array, err_msg=key)


def test_pytorch_float8() -> None:
    found = LOADER.load(DATA / "float8.pt", "w")
    assert found.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(found.astype(np.float32), [0.5, -1.0, 448.0])


def test_pytorch_part_of_a_strided_view() -> None:
    whole = LOADER.load(DATA / "archive.pt", "model.turned")
    part = (slice(1, 3), slice(0, 4, 2))
    np.testing.assert_array_equal(LOADER.load(DATA / "archive.pt", "model.turned", part=part), whole[part])


def test_pytorch_with_what_stands_beside_tensors() -> None:
    """Counters, bytes, numbers and arrays of NumPy, dates, a tensor and a parameter with attributes, fp4."""
    found = LOADER.load_many(DATA / "beside.pt")
    assert found.keys() == {"noted", "parameter", "pairs"}
    np.testing.assert_array_equal(found["noted"], [1.0, 2.0])
    np.testing.assert_array_equal(found["parameter"], [3.0, 4.0])
    assert found["pairs"].shape == (2, 4)
    np.testing.assert_array_equal(found["pairs"].astype(np.float32), [[0.5, 1.0, 1.5, 2.0], [3.0, 4.0, 6.0, -0.5]])


def test_torchscript() -> None:
    """Parameters and buffers by their names, and the tensors of its code by number; nothing of the code."""
    expected = dict(np.load(DATA / "script.npz"))
    found = LOADER.load_many(DATA / "script.pt")
    assert found.keys() == {*expected, "constants.0", "constants.1"}
    for key, array in expected.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    np.testing.assert_array_equal(found["constants.0"], [0.5, 0.5])
    np.testing.assert_array_equal(found["constants.1"], [[2.0]])


# -- GGUF -----------------------------------------------------------------------------------------------------------


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint32("answer", 42)
    writer.add_array("words", ["a", "bc"])
    plain = {"f32": some((4, 64), np.float32), "f16": some((64,), np.float16), "i32": some((2, 3, 4), np.int32)}
    for name, array in plain.items():
        writer.add_tensor(name, array)
    source = some((8, 256), np.float32)
    kinds = [gguf.GGMLQuantizationType[k] for k in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "TQ1_0", "TQ2_0")]
    for kind in kinds:
        writer.add_tensor(kind.name, gguf.quants.quantize(source, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = LOADER.load_many(path)
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for kind in kinds:
        expected = gguf.quants.dequantize(theirs[kind.name].data, kind)
        np.testing.assert_array_equal(found[kind.name], expected)
        raw = LOADER.load(path, kind.name, raw=True)
        np.testing.assert_array_equal(raw, theirs[kind.name].data)
    meta = LOADER.metadata(path)
    assert meta.notes["answer"] == 42 and meta.notes["words"] == ["a", "bc"]
    assert meta.tensors["Q4_0"].encoding == "Q4_0" and meta.tensors["Q4_0"].nbytes == 8 * 8 * 18


def decodable() -> list[str]:
    """The kinds of blocks that the package decodes."""
    found = []
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if block > 1:
            try:
                gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
                found.append(kind.name)
            except NotImplementedError:
                pass
    return found


@pytest.mark.parametrize("name", decodable())
def test_gguf_parts_of_every_kind_of_block(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    codes = np.random.default_rng(5).integers(0, 256, (3, 6, 2 * size)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_tensor("x", codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(codes, kind).reshape(3, 6, 2 * block)
        for part in (
            (slice(None),),
            (slice(1, 2), slice(1, 6, 3)),
            (slice(0, 3, 2), slice(2, 3), slice(3, block, 7)),
            (slice(2, 3), slice(0, 2), slice(block, 2 * block)),
            (slice(0, 0),),
        ):
            got = LOADER.load(tmp_path / "m.gguf", "x", part=part)
            np.testing.assert_array_equal(got, expected[part])


def test_gguf_part_costs_its_blocks(tmp_path: Path) -> None:
    from ranvier.weights.formats.gguf_files import Blocks
    from ranvier.weights.stored import Stored, TensorInfo
    from tests.weights.test_transforms import Counted

    codes = np.zeros((1000, 8 * 18), np.uint8)
    blob = Counted("x", codes.tobytes())
    raw = Stored(TensorInfo("x", DType.uint8, codes.shape, codes.nbytes, "Q4_0"), blob, 0)
    weight = Blocks(TensorInfo("x", DType.float32, (1000, 256), codes.nbytes, "Q4_0"), raw, 32, 18)
    weight.read((slice(10, 20, 1), slice(0, 256, 1)))
    assert blob.asked == 10 * 8 * 18


def test_gguf_vocabularies_longer_than_a_piece(tmp_path: Path) -> None:
    words = [f"word {k} " + "é" * (k % 7) for k in range(60_000)] + ["", "x" * (3 << 20), "last"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_array("words", words)
    writer.add_uint32("behind", 7)
    writer.add_tensor("x", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    notes = LOADER.metadata(tmp_path / "m.gguf").notes
    assert notes["words"] == words and notes["behind"] == 7


def big_endian(path: Path, tensors: dict[str, Any], blocks: dict[str, Any] | None = None) -> None:
    """A file as machines write it that have the highest byte first."""
    writer = gguf.GGUFWriter(path, "test", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("answer", 42)
    writer.add_float64("half", 0.5)
    writer.add_bool("yes", True)
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [1, -2, 300])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for name, codes in (blocks or {}).items():
        writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_with_the_highest_byte_first(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kinds = ("float32", "float16", "float64", "int8", "int16", "int32", "int64")
    plain = {kind: some((3, 4, 8), DType[kind].numpy) for kind in kinds}
    big_endian(path, plain)
    meta = LOADER.metadata(path)
    expected = {"answer": 42, "half": 0.5, "yes": True, "words": ["a", "bc", ""], "numbers": [1, -2, 300]}
    assert {key: meta.notes[key] for key in expected} == expected
    assert {name: (info.dtype.name, info.shape) for name, info in meta.tensors.items()} == {
        kind: (kind, (3, 4, 8)) for kind in kinds
    }
    found = LOADER.load_many(path)
    for name, array in plain.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        part = (slice(1, 3), slice(0, 4, 2), slice(3, 7))
        np.testing.assert_array_equal(LOADER.load(path, name, part=part), array[part])
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name in kinds:
        np.testing.assert_array_equal(found[name], theirs[name].data)


def test_gguf_blocks_with_the_highest_byte_first(tmp_path: Path) -> None:
    """What is there is told, and plain tensors beside them are read; the order of bytes in blocks nobody knows."""
    path = tmp_path / "m.gguf"
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "BF16")]
    codes = {kind.name: gguf.quants.quantize(some((8, 256), np.float32), kind) for kind in kinds}
    big_endian(path, {"plain": some((2, 3), np.float32)}, codes)
    found = LOADER.metadata(path).tensors
    assert found["Q4_0"].encoding == "Q4_0" and found["BF16"].dtype is DType.bfloat16
    assert LOADER.load(path, "plain").shape == (2, 3)
    for name, raw in itertools.product(codes, (False, True)):
        with pytest.raises(NotSupported, match=rf"'{name}'.*'m\.gguf'.*highest byte first.*gguf-convert-endian"):
            LOADER.load(path, name, raw=raw)


def test_gguf_of_no_version_in_either_order() -> None:
    for version, told in ((b"\0\0\0\4", 4), (b"\4\0\0\0", 4), (b"\1\2\3\4", 0x01020304)):
        with pytest.raises(WeightError, match=f"of version {told}, not of 2 or 3"):
            LOADER.metadata(MemorySource(b"GGUF" + version + bytes(16), "gguf"))


def test_as_many_axes_as_operators_take() -> None:
    from ranvier.ops.allocation import MAX_RANK
    from ranvier.weights.stored import MOST_AXES

    assert MOST_AXES == MAX_RANK


# -- ONNX, raw, others ----------------------------------------------------------------------------------------------


def test_onnx_initializers(tmp_path: Path) -> None:
    array = some((3, 4), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", 1, [2, 3])
    y = helper.make_tensor_value_info("y", 1, [2, 4])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(array, "w")])
    model = helper.make_model(graph)
    onnx.save(model, tmp_path / "m.onnx")
    np.testing.assert_array_equal(LOADER.load(tmp_path / "m.onnx", "w"), array)
    np.testing.assert_array_equal(LOADER.load(MemorySource(model.SerializeToString(), "onnx"), "w"), array)


def test_raw() -> None:
    array = some((4, 5), np.float32)
    data = b"head" + array.tobytes()
    got = LOADER.load(MemorySource(data, "raw"), dtype="float32", shape=(4, 5), offset=4)
    np.testing.assert_array_equal(got, array)
    swapped = array.astype(">f4").tobytes()
    np.testing.assert_array_equal(LOADER.load(MemorySource(swapped, "raw"), dtype=">f4", shape=array.shape), array)
    with pytest.raises(WeightError, match="dtype and shape"):
        LOADER.load(MemorySource(data, "raw"))
    with pytest.raises(WeightError, match="takes bytes 8 to 88 of 84"):
        LOADER.load(MemorySource(data, "raw"), dtype="float32", shape=(4, 5), offset=8)


@pytest.mark.parametrize(("dtype", "low"), [("int4", -8), ("uint4", 0), ("int2", -2), ("uint2", 0)])
def test_packed_elements(dtype: str, low: int) -> None:
    bits = DType[dtype].bits
    codes = np.random.default_rng(1).integers(low, low + 2**bits, 21)
    packed = bytearray((21 * bits + 7) // 8)
    for k, code in enumerate(codes):
        packed[k * bits // 8] |= (int(code) & (2**bits - 1)) << (k * bits % 8)
    got = LOADER.load(MemorySource(bytes(packed), "raw"), dtype=dtype, shape=(3, 7))
    np.testing.assert_array_equal(got.astype(np.int64).reshape(-1), codes)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    from ranvier.weights.formats.base import Checkpoint
    from ranvier.weights.formats.raw import Raw

    class Lines:
        name = "lines"
        suffixes = (".lines",)

        def matches(self, head: bytes, name: str) -> bool:
            return head.startswith(b"LINES")

        def open(self, blob: Any, opening: Any) -> Checkpoint:
            from dataclasses import replace

            return Raw().open(blob, replace(opening, options={"dtype": "uint8", "shape": (3,), "offset": 5}))

    register_format(Lines())
    try:
        (tmp_path / "x.bin").write_bytes(b"LINES\1\2\3")
        assert LOADER.load(tmp_path / "x.bin").tolist() == [1, 2, 3]
        assert "lines" in LOADER.capabilities()["formats"]
    finally:
        from ranvier.weights.formats import registry

        del registry._added["lines"]


def test_a_package_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named where it is asked for, and keeps nobody from files of other formats."""
    from importlib.metadata import EntryPoint

    from ranvier.weights.formats import registry as formats
    from ranvier.weights.sources import registry as sources

    for module, name in ((formats, "lines"), (sources, "far")):
        entry = EntryPoint(name, "nowhere_to_be_found:Thing", module.ENTRY_POINTS)
        monkeypatch.setattr(module, "plugged", lambda group, entry=entry: {entry.name: entry})
    save_safetensors(tmp_path / "m.safetensors", {"a": np.ones(2)})
    assert LOADER.load(tmp_path / "m.safetensors").shape == (2,)
    with pytest.raises(InvalidConfig, match="'lines' cannot be loaded: ModuleNotFoundError"):
        LOADER.load(tmp_path / "m.safetensors", format="lines")
    with pytest.raises(InvalidConfig, match="sources far:// cannot be loaded: ModuleNotFoundError"):
        LOADER.load("far://me:secret@host/m")


def test_a_format_that_has_another_name_than_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from ranvier.weights.formats import registry

    entry = EntryPoint("plain", "ranvier.weights.formats.raw:Raw", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "plugged", lambda group: {entry.name: entry})
    monkeypatch.setattr(registry, "_added", {})
    for _ in range(2):
        assert LOADER.load(MemorySource(b"ab", "plain"), dtype="uint8", shape=(2,)).tolist() == [97, 98]


def test_which_tensor(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"a": np.ones(2), "b": np.zeros(3)})
    assert LOADER.load(FileSource(tmp_path / "m.safetensors", tensor="b")).shape == (3,)
    with pytest.raises(WeightError, match="holds 2 tensors, say which one: 'a', 'b'"):
        LOADER.load(tmp_path / "m.safetensors")
    with pytest.raises(WeightError, match="has no tensor"):
        LOADER.load_many(tmp_path / "m.safetensors", ["c"])
    with pytest.raises(InvalidConfig, match="did you mean 'safetensors'"):
        LOADER.open(tmp_path / "m.safetensors", format="safetensor")
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    assert LOADER.load(buffer.getvalue()).tolist() == [0, 1, 2]


def test_safetensors_without_notes_and_with_a_name_of_nothing(tmp_path: Path) -> None:
    """Both are sound, and readers of the format take them."""
    entries = {"": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    entries["b"] = {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}
    header = json.dumps({"__metadata__": None, **entries}).encode()
    data = MemorySource(len(header).to_bytes(8, "little") + header + b"\1\2", "safetensors")
    assert not LOADER.metadata(data).notes
    assert LOADER.load(data, "").tolist() == [1] and LOADER.load(data, "b").tolist() == [2]


def test_safetensors_of_nothing_without_a_name() -> None:
    assert LOADER.load_many(safetensors.numpy.save({})) == {}


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        (["a"], {"epoch": 3}),
        (["a"], {"epoch": None}),
        (["a"], {3: "epoch"}),
        (["a", "__metadata__"], {}),
        (["a", 1], {}),
        (["\ud800"], {}),
    ],
)
def test_safetensors_that_nobody_could_read_are_not_written(tmp_path: Path, names: list[Any], notes: Any) -> None:
    with pytest.raises(WeightError):
        save_safetensors(tmp_path / "x.safetensors", {name: np.ones(1) for name in names}, notes)
    assert not list(tmp_path.iterdir())
