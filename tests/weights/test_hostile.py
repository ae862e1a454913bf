"""Files that lie: each ends in a typed error, none in a crash, a loop, or code that ran."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.errors import DTypeMismatch, InvalidConfig, OutOfMemory, RanvierError, ResourceLimit, WeightError
from ranvier.weights import Cast, FileSource, MemorySource, Opening, WeightLoader, save_safetensors
from ranvier.weights.blob import MemoryBlob
from ranvier.weights.formats.numpy_files import Npz
from ranvier.weights.stored import Decoded

LOADER = WeightLoader(offline=True)
DATA = Path(__file__).parent / "data"


def safetensors_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[Any], first: Any, last: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


BAD_HEADERS: dict[str, tuple[Any, bytes]] = {
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6)),
    "gap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)}, bytes(6)),
    "cut off": ({"a": entry("U8", [9], 0, 9)}, bytes(4)),
    "trailing bytes": ({"a": entry("U8", [2], 0, 2)}, bytes(4)),
    "shape does not fit": ({"a": entry("F32", [2], 0, 4)}, bytes(4)),
    "product overflows": ({"a": entry("F32", [2**40, 2**40], 0, 0)}, b""),
    "empty, but no array is like that": ({"a": entry("F32", [0, 2**62], 0, 0)}, b""),
    "negative size": ({"a": entry("U8", [-4], 0, 4)}, bytes(4)),
    "size is no number": ({"a": entry("U8", ["4"], 0, 4)}, bytes(4)),
    "size is true": ({"a": entry("U8", [True], 0, 1)}, bytes(1)),
    "offsets backwards": ({"a": entry("U8", [4], 4, 0)}, bytes(4)),
    "offset is no number": ({"a": entry("U8", [4], 0, "4")}, bytes(4)),
    "unknown type": ({"a": entry("F5", [4], 0, 4)}, bytes(4)),
    "type is a list": ({"a": entry([], [4], 0, 4)}, bytes(4)),  # type: ignore[arg-type]
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "a list": ([1, 2], b""),
    "not JSON": (b"{'a': 1}", b""),
    "twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"1"),
    "half of a character": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "half of a character, in bytes": (b'{"\xed\xa0\x80":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "half of a character in a note": (b'{"__metadata__":{"a":"\\udc00"}}', b""),
    "in UTF-16": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode("utf-16-le"), b"1"),
    "deep": (b'{"a":' + b"[" * 100_000, b""),
    "too many axes": ({"a": entry("U8", [1] * 100, 0, 1)}, b"1"),
    "notes are no text": ({"__metadata__": {"a": 1}}, b""),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_safetensors_header(name: str) -> None:
    header, data = BAD_HEADERS[name]
    with pytest.raises((WeightError, ResourceLimit)):
        LOADER.metadata(MemorySource(safetensors_file(header, data), "safetensors"))


@pytest.mark.parametrize("length", [0, 7, 2**63, 2**64 - 1, 10**9])
def test_safetensors_length(length: int) -> None:
    with pytest.raises(WeightError):
        LOADER.metadata(MemorySource(struct.pack("<Q", length) + b"{}  ", "safetensors"))


def whole(kind: str, folder: Path) -> bytes:
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int16)}
    buffer = io.BytesIO()
    if kind == "safetensors":
        save_safetensors(folder / "m", arrays)
        return (folder / "m").read_bytes()
    if kind == "npy":
        np.save(buffer, arrays["a"])
    elif kind == "npz":
        np.savez_compressed(buffer, **arrays)
    elif kind == "pytorch":
        return (DATA / "archive.pt").read_bytes()
    elif kind == "legacy":
        return (DATA / "legacy.pth").read_bytes()
    elif kind == "gguf":
        import gguf

        writer = gguf.GGUFWriter(folder / "g", "test")
        writer.add_string("note", "text")
        for name, array in arrays.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (folder / "g").read_bytes()
    return buffer.getvalue()


KINDS = {
    "safetensors": "safetensors",
    "npy": "npy",
    "npz": "npz",
    "pytorch": "pytorch",
    "legacy": "pytorch",
    "gguf": "gguf",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    return {kind: whole(kind, folder) for kind in KINDS}


def attempt(data: bytes, kind: str) -> None:
    """All of it is read, or a typed error says why not."""
    with contextlib.suppress(RanvierError):
        LOADER.load_many(MemorySource(data, KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bytes_changed(kind: str, files: dict[str, bytes], seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(files[kind])
    for _ in range(int(rng.integers(1, 8))):
        place = int(rng.integers(0, len(data) if rng.integers(2) else min(len(data), 400)))
        data[place] = int(rng.integers(0, 256))
    attempt(bytes(data), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_anywhere(kind: str, files: dict[str, bytes]) -> None:
    data = files[kind]
    needed = len(data) - (31 if kind == "gguf" else 0)  # the last tensor is padded
    for stop in range(0, needed, max(1, len(data) // 200)):
        with pytest.raises(RanvierError):
            LOADER.load_many(MemorySource(data[:stop], KINDS[kind]))


# -- PyTorch: programs in place of data -------------------------------------------------------------------------------


def torch_file(program: bytes, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", program)
        for name, data in members.items():
            archive.writestr(f"m/data/{name}", data)
    return buffer.getvalue()


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_do_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    program = pickle.dumps({"w": _Evil(str(target))}, protocol)
    with pytest.raises(WeightError, match=r"mkdir|instruction"):
        LOADER.metadata(MemorySource(torch_file(program), "pytorch"))
    assert not target.exists()


PROGRAMS = {
    "a global that rebuilds by import": b"cbuiltins\neval\n(V1+1\ntR.",
    "an instance": b"(i__main__\nx\n.",
    "an object": b"(cos\nsystem\nV\nls\no.",
    "an extension": b"\x82\x01.",
    "a bytearray that is cut off": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a buffer from elsewhere": b"\x97.",
    "a call of data": b"(V1\n(tR.",
    "an empty stack": b"0.",
    "a memo that is not there": b"h\x05.",
    "no end": b"}",
    "a persistent id that is no storage": b"V1\nQ.",
    "an ordered dictionary of a name": b"ccollections\nOrderedDict\n(cos\nsystem\ntR.",
    "a set of items on a list": b"](V1\nV2\nu.",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_programs(name: str) -> None:
    with pytest.raises(WeightError):
        LOADER.metadata(MemorySource(torch_file(PROGRAMS[name]), "pytorch"))


def test_a_list_in_itself_and_many_times(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    many: list[Any] = []
    for _ in range(60):
        many = [many, many]
    for tree in (itself, many):
        with pytest.raises(WeightError, match="levels"):
            LOADER.metadata(MemorySource(torch_file(pickle.dumps(tree, 2)), "pytorch"))


def doubled(times: int) -> bytes:
    """A tuple that holds a tuple twice, which holds a tuple twice ...: short to write, endless to look at."""
    program = b")q\0"
    for k in range(times):
        program += b"0h" + bytes([k]) + b"h" + bytes([k]) + b"\x86q" + bytes([k + 1])
    return program


STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"
REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0"
ENDLESS = {
    "a persistent id": b"\x80\x02" + doubled(60) + b"Q.",
    "a key": b"\x80\x02}" + doubled(60) + b"K\1s.",
    "a key of an ordered dictionary": b"\x80\x02ccollections\nOrderedDict\n(]" + doubled(60) + b"K\1\x86atR.",
    "a shape": b"\x80\x02}Vw\n" + REBUILT + doubled(60) + b")\x89NtRs.",
    "names under a long name": b"\x80\x02}X" + struct.pack("<I", 1 << 20) + b"k" * (1 << 20)
    + b"(" + REBUILT + b"))\x89NtRq\7" + b"h\7" * 20_000 + b"ls.",
    "a number as a key": b"\x80\x02}\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20) + REBUILT + b"))\x89NtRs.",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_programs_without_end(name: str) -> None:
    with pytest.raises(WeightError):
        LOADER.metadata(MemorySource(torch_file(ENDLESS[name], **{"0": bytes(4)}), "pytorch"))


def test_programs_with_many_marks_take_no_longer_than_others() -> None:
    """What is above a mark was looked for on all of the stack, each time."""
    program = b"\x80\x02" + b"K\1" * 50_000 + b"(t0" * 20_000 + b"."
    began = time.process_time()
    with pytest.raises(WeightError, match="not sound"):
        LOADER.metadata(MemorySource(torch_file(program), "pytorch"))
    assert time.process_time() - began < 5.0  # it took many times as long


@pytest.mark.parametrize(
    "program", [b"\x80\x02(.", b"\x80\x02}(.", b"\x80\x02}(0(000.", b"\x80\x02}t.", b"\x80\x02(0."]
)
def test_marks_without_values(program: bytes) -> None:
    with pytest.raises(WeightError, match="not sound"):
        LOADER.metadata(MemorySource(torch_file(program), "pytorch"))


def test_a_mark_may_be_taken_away() -> None:
    """As pickle itself does."""
    assert pickle.loads(b"\x80\x02}(0.") == {}
    assert not LOADER.metadata(MemorySource(torch_file(b"\x80\x02}(0."), "pytorch")).tensors


def test_names_are_text() -> None:
    program = b"\x80\x02}X\x03\0\0\0\xed\xa0\x80" + REBUILT + b"))\x89NtRs."
    with pytest.raises(WeightError, match="whose name is no text"):
        LOADER.metadata(MemorySource(torch_file(program, **{"0": bytes(4)}), "pytorch"))


def test_keys_that_occur_twice(files: dict[str, bytes]) -> None:
    """One reader would keep the first, another the last."""
    key = b"\x04\0\0\0\0\0\0\0note"
    data = files["gguf"]
    assert data.count(key) == 1
    same = data.replace(key, b"\x14\0\0\0\0\0\0\0general.architecture")
    with pytest.raises(WeightError, match=r"'general\.architecture' occurs twice"):
        LOADER.metadata(MemorySource(same, "gguf"))


def gguf_file(tensors: int, keys: int, rest: bytes) -> MemorySource:
    return MemorySource(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest, "gguf")


def nested(*levels: tuple[int, int], data: bytes = b"") -> bytes:
    """A key whose value is a list, whose entries are lists …: kinds of their entries, and how many there are."""
    return (
        struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<I", 9)
        + b"".join(struct.pack("<IQ", *each) for each in levels)
        + data
    )


EMPTY = struct.pack("<IQ", 0, 0)
LONG_HEADERS = {
    "lists": (0, 1, nested((9, 3_000_000)), "lists in lists"),
    "lists in lists": (0, 1, nested((9, 400), data=(struct.pack("<IQ", 9, 250) + EMPTY * 250) * 400), "lists in lists"),
    "texts": (0, 1, nested((8, 5_000_000)), "entries of lists"),
    "numbers": (0, 1, nested((0, 5_000_000)), "entries of lists"),
    "more than there could be": (0, 1, nested((9, 1 << 63)), "entries of lists"),
    "keys": (0, 1_000_000, b"", "keys"),
    "tensors": (1_000_000, 0, b"", "tensors"),
    "deep": (0, 1, nested(*[(9, 1)] * 6, (0, 0)), "more than 4 deep"),
}


@pytest.mark.parametrize("name", LONG_HEADERS)
def test_gguf_headers_that_take_long(name: str) -> None:
    """A few bytes in the file each, a list, a text or a tensor here: told before any of it is read."""
    tensors, keys, rest, what = LONG_HEADERS[name]
    with pytest.raises(WeightError, match=what):
        LOADER.metadata(gguf_file(tensors, keys, rest))


def test_gguf_lists_in_lists() -> None:
    rows = b"".join(struct.pack("<IQ3H", 2, 3, k, 1, 2) for k in range(1000))
    assert LOADER.metadata(gguf_file(0, 1, nested((9, 1000), data=rows))).notes["k"] == [[k, 1, 2] for k in range(1000)]
    assert LOADER.metadata(gguf_file(0, 1, nested(*[(9, 1)] * 4, (0, 0)))).notes["k"] == [[[[[]]]]]


def test_two_tensors_of_one_name() -> None:
    tensor = REBUILT + b"))\x89NtR"
    program = b"\x80\x02}(Va\n}Vb\n" + tensor + b"sVa.b\n" + tensor + b"u."
    with pytest.raises(WeightError, match=r"two tensors have the name 'a\.b'"):
        LOADER.metadata(MemorySource(torch_file(program, **{"0": bytes(4)}), "pytorch"))


@pytest.mark.parametrize("name", ["conj", "neg"])
def test_tensors_that_are_yet_to_be_changed(name: str) -> None:
    program = b"\x80\x02}Vw\n" + REBUILT + b"))\x89N}V" + name.encode() + b"\n\x88stRs."
    with pytest.raises(WeightError, match="resolve_conj"):
        LOADER.metadata(MemorySource(torch_file(program, **{"0": bytes(4)}), "pytorch"))


@pytest.mark.parametrize(
    ("called", "what"),
    [
        (b"ctorch.serialization\n_get_layout\n(Vtorch.sparse_coo\ntR.", "a sparse tensor"),
        (b"ctorch._utils\n_rebuild_sparse_tensor\n)R.", "a sparse tensor"),
        (b"(Vstorage\nctorch\nQInt8Storage\nV0\nVcpu\nK\1tQ.", "a quantized tensor"),
        (b"ctorch._utils\n_rebuild_qtensor\n)R.", "a quantized tensor"),
        (b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R.", "a tensor of the device 'meta'"),
        (b"ctorch._utils\n_rebuild_nested_tensor\n)R.", "a nested tensor"),
    ],
)
def test_tensors_of_other_kinds_are_named(called: bytes, what: str) -> None:
    with pytest.raises(WeightError, match=f"holds {what}"):
        LOADER.metadata(MemorySource(torch_file(b"\x80\x02" + called), "pytorch"))


def tensor_program(count: int, offset: int, shape: list[int], strides: list[int], rebuild: str = "_v2") -> bytes:
    """What torch writes for one float32 tensor, put together by hand."""

    def number(value: int) -> bytes:
        data = value.to_bytes(max(9, value.bit_length() // 8 + 1), "little", signed=True)
        return b"\x8b" + struct.pack("<i", len(data)) + data

    numbers = [b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides)]
    storage = b"(V" + b"storage\nctorch\nFloatStorage\nV0\nVcpu\n" + number(count) + b"tQ"
    name = f"ctorch._utils\n_rebuild_tensor{rebuild}\n(".encode()
    call = name + storage + number(offset) + numbers[0] + numbers[1] + (b"\x89Nt" if rebuild else b"t") + b"R"
    return b"\x80\x02}Vw\n" + call + b"s."


def script_file(program: bytes, constants: bytes = b"\x80\x02).", **members: bytes) -> bytes:
    buffer = io.BytesIO(torch_file(program, **members))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("m/constants.pkl", constants)
    return buffer.getvalue()


MODULE = b"c__torch__\nM\n)\x81"


def test_modules_are_read_in_programs_alone() -> None:
    program = b"\x80\x02" + MODULE + b"}b."
    assert not LOADER.metadata(MemorySource(script_file(program), "pytorch")).tensors
    with pytest.raises(WeightError, match=r"calls __torch__\.M"):
        LOADER.metadata(MemorySource(torch_file(program), "pytorch"))


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(Vls\ntR.",  # calls in a program are those of a checkpoint and no more
        b"ctorch.jit._pickle\nbuild_intlist\n)R.",  # a list of nothing at all
        MODULE + b"(Va\n]u.",  # items of an object
        MODULE + b"}((K\1t](t]sb.",  # attributes whose names are no names
        MODULE + b"q\0}Vself\nh\0sb.",  # an object in itself
        MODULE + b"}Vw\n" + tensor_program(6, 0, [2, 3], [3, 1])[2 + len(b"}Vw\n") : -2] + b"sb.",  # storage missing
    ],
)
def test_programs_that_are_none(program: bytes) -> None:
    with pytest.raises(WeightError):
        LOADER.metadata(MemorySource(script_file(b"\x80\x02" + program), "pytorch"))


def test_constants_are_tensors_of_their_own_folder() -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    constants = tensor_program(6, 0, [6], [1])[len(b"\x80\x02}Vw\n") : -2] + b"\x85."
    program = b"\x80\x02" + MODULE + b"}b."
    with pytest.raises(WeightError, match="no data for storage"):
        LOADER.metadata(MemorySource(script_file(program, constants, **{"0": data}), "pytorch"))
    buffer = io.BytesIO(script_file(program, constants))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("m/constants/0", data)
    found = LOADER.load_many(MemorySource(buffer.getvalue(), "pytorch"))
    np.testing.assert_array_equal(found["constants.0"], np.arange(6))


def test_a_package_of_torch_is_named() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/.data/python_version", "3.11")
        archive.writestr("m/models/model", b"\x80\x02N.")
    with pytest.raises(WeightError, match=r"a package of torch\.package"):
        LOADER.metadata(MemorySource(buffer.getvalue(), "pytorch"))


def test_what_newer_pickles_have_beside_tensors() -> None:
    """Sets that stay as they are, bytes that do not, dates with their zone, arrays of NumPy."""
    zone = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for protocol in (2, 3, 4, 5):
        beside = {"set": frozenset([1]), "bytes": bytearray(b"x"), "when": zone, "array": np.arange(3)}
        program = pickle.dumps(beside, protocol=protocol)
        assert not LOADER.metadata(MemorySource(torch_file(program), "pytorch")).tensors
    layout = b"ctorch.serialization\n_get_layout\n(Vtorch.strided\ntR."
    assert not LOADER.metadata(MemorySource(torch_file(b"\x80\x02" + layout), "pytorch")).tensors
    path = b"cpathlib._local\nPosixPath\n(Va\ntR."  # as Python 3.13 names it
    assert not LOADER.metadata(MemorySource(torch_file(b"\x80\x02" + path), "pytorch")).tensors


def test_tensors_stay_inside_their_storage() -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    got = LOADER.load(MemorySource(torch_file(tensor_program(6, 0, [2, 3], [1, 2]), **{"0": data}), "pytorch"), "w")
    np.testing.assert_array_equal(got, np.arange(6, dtype=np.float32).reshape(3, 2).T)
    for count, offset, shape, strides in [
        (6, 1, [2, 3], [3, 1]),
        (6, 0, [2, 3], [4, 1]),
        (7, 0, [7], [1]),
        (6, 0, [2**62, 4], [0, 1]),
        (6, 2**62, [1], [1]),
        (6, 0, [-1], [1]),
        (6, 0, [2], [-1]),
    ]:
        program = tensor_program(count, offset, shape, strides)
        with pytest.raises(RanvierError):
            LOADER.load(MemorySource(torch_file(program, **{"0": data}), "pytorch"), "w")


def test_tensors_of_versions_before_0_4() -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    program = tensor_program(6, 1, [2, 2], [2, 1], rebuild="")
    got = LOADER.load(MemorySource(torch_file(program, **{"0": data}), "pytorch"), "w")
    assert got.tolist() == [[1, 2], [3, 4]]


def test_a_tensor_without_elements_may_begin_behind_its_storage() -> None:
    """Where it is the end of one that takes every third element, for example: ``x[::3][2:]`` of four."""
    program = tensor_program(4, 6, [0], [3])
    assert LOADER.load(MemorySource(torch_file(program, **{"0": bytes(16)}), "pytorch"), "w").shape == (0,)


@pytest.mark.parametrize("at", range(4))
def test_numbers_of_millions_of_digits(at: int) -> None:
    """What they give when they are multiplied, or written in an error, nobody wants to wait for."""
    huge = (1 << 8_000_000) - 1
    given: list[Any] = [1, 0, [1] * 4, [1] * 4]
    given[at] = [huge] * 4 if at > 1 else huge
    for loader in (LOADER, WeightLoader(offline=True, tensor_bytes=None)):
        began = time.monotonic()
        with pytest.raises(WeightError) as caught:
            loader.metadata(MemorySource(torch_file(tensor_program(*given), **{"0": bytes(4)}), "pytorch"))
        assert time.monotonic() - began < 5 and len(str(caught.value)) < 200


# -- archives and arrays -------------------------------------------------------------------------------------------


def test_an_archive_that_unpacks_to_too_much() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (50_000_000,)})
        archive.writestr("a.npy", head.getvalue() + bytes(50_000_000))
    small = WeightLoader(offline=True, tensor_bytes=1 << 20)
    with pytest.raises(ResourceLimit, match="tensor_bytes"):
        small.metadata(MemorySource(buffer.getvalue(), "npz"))


def test_an_archive_whose_directory_is_longer_than_a_header_may_be() -> None:
    """Every entry of it takes ten times as much in memory."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"a{k}": np.zeros(1) for k in range(100)})
    blob = MemoryBlob("x.npz", buffer.getvalue())
    assert len(Npz().open(blob, Opening())) == 100
    with pytest.raises(WeightError, match=r"a directory of [0-9]+ bytes"):
        Npz().open(blob, Opening(header_bytes=1000))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_compressed_as_numpy_does_not(method: int) -> None:
    """The decoder of one takes as much memory as the file says, up to 4 GB; of the other 45 bytes become 100 MB."""
    buffer, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(1000))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", array.getvalue())
    with pytest.raises(WeightError, match="in a way that NumPy does not write"):
        LOADER.metadata(MemorySource(buffer.getvalue(), "npz"))


def test_a_member_whose_own_name_is_no_text() -> None:
    """Its own header says that the name is in UTF-8, which it is not."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, name=np.zeros(1000))
    data = bytearray(buffer.getvalue())
    data[7] |= 0x08
    data[30] = 0xFF
    with pytest.raises(WeightError, match=r"member 'name\.npy' cannot be read"):
        LOADER.load(MemorySource(bytes(data), "npz"))


def test_objects_are_not_unpickled() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(WeightError, match="not numbers"):
        LOADER.load(MemorySource(buffer.getvalue(), "npy"))


def test_names_lead_nowhere_else(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_safetensors(tmp_path / "secret.safetensors", {"a": np.ones(2)})
    index = inner / "m.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..", "", "a/b", "a\0"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(WeightError):
            LOADER.metadata(index)
    (inner / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "link.safetensors"}}))
    with pytest.raises(WeightError, match="leads out"):
        LOADER.metadata(index)


def test_links_of_a_cache_by_content_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_safetensors(blobs / "1234", {"a": np.ones(2)})
    (blobs / "5678").write_text(json.dumps({"weight_map": {"a": "m-1.safetensors"}}))
    (snapshot / "m-1.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "m.safetensors.index.json").symlink_to("../../blobs/5678")
    assert LOADER.load(snapshot / "m.safetensors.index.json", "a").tolist() == [1, 1]


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    long = tmp_path / ("a" * 300)
    for path in (tmp_path / "pipe", long, tmp_path):
        with pytest.raises(WeightError, match="cannot open"):
            LOADER.load(path)
        with pytest.raises(WeightError, match="no file"):
            LOADER.preload(path)
        assert not LOADER.available(path)


def test_what_stands_in_place_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")
    with pytest.raises(WeightError, match="git lfs pull"):
        LOADER.metadata(path)
    path.write_bytes(b"<!DOCTYPE html><p>Log in, please")
    with pytest.raises(WeightError, match="page of HTML"):
        LOADER.metadata(path)


@pytest.mark.parametrize("dtype", ["str", "object", "U4"])
def test_raw_bytes_are_never_addresses(dtype: str) -> None:
    with pytest.raises(WeightError, match="numbers"):
        LOADER.load(MemorySource(b"\xff" * 64, "raw"), dtype=dtype, shape=(2,))


@pytest.mark.parametrize("dtype", [",", "f4,(", "(99999999999,)f4", "wat"])
def test_types_that_are_none(dtype: str) -> None:
    with pytest.raises(DTypeMismatch, match="no element type"):
        LOADER.load(MemorySource(bytes(64), "raw"), dtype=dtype, shape=(2,))
    for wrong in (dtype, None):
        with pytest.raises(DTypeMismatch, match="no element type"):
            LOADER.load(MemorySource(bytes(64), "raw"), None, Cast(wrong), dtype="float32", shape=(2,))


@pytest.mark.parametrize("options", [{"dtype": None, "shape": (2,)}, {"dtype": "u1", "shape": None}, {"shape": (2,)}])
def test_nothing_is_no_type(options: dict[str, Any]) -> None:
    """NumPy would take it for float64."""
    with pytest.raises(WeightError, match="needs the options dtype and shape"):
        LOADER.load(MemorySource(bytes(64), "raw"), **options)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="there are no longer numbers on this machine")
def test_numbers_that_only_some_machines_have() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(2, np.longdouble))
    with pytest.raises(WeightError, match="only the machine that wrote it"):
        LOADER.metadata(MemorySource(buffer.getvalue(), "npy"))


@pytest.mark.parametrize("options", [{"shape": 4}, {"shape": ("4",)}, {"shape": (4,), "offset": "x"}])
def test_raw_options(options: dict[str, Any]) -> None:
    with pytest.raises(WeightError, match="whole numbers"):
        LOADER.load(MemorySource(bytes(64), "raw"), dtype="float32", **options)


@pytest.mark.parametrize("part", [slice(0, 5, 0), slice("a"), np.array([1, 2]), (..., ...), 1, (slice(None),) * 3])
def test_parts_that_are_none(part: Any) -> None:
    with pytest.raises(WeightError, match="cannot be cut by"):
        LOADER.load(MemorySource(bytes(16), "raw"), part=part, dtype="float32", shape=(2, 2))


def test_options_of_another_format(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"a": np.ones(2)})
    with pytest.raises(InvalidConfig, match="safetensors has no option 'dtype'"):
        LOADER.load(tmp_path / "m.safetensors", "a", dtype="float16")
    with pytest.raises(InvalidConfig, match="did you mean 'offset'"):
        LOADER.load(MemorySource(bytes(8), "raw"), dtype="uint8", shape=(8,), ofset=1)


def test_an_index_of_an_index(tmp_path: Path) -> None:
    index = tmp_path / "m.index.json"
    index.write_text(json.dumps({"weight_map": {"a": index.name}}))
    with pytest.raises(WeightError, match="an index again"):
        LOADER.metadata(index)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="cannot open"):
        LOADER.load(tmp_path / "absent.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(WeightError, match="0 bytes"):
        LOADER.load(tmp_path / "empty.safetensors")
    with pytest.raises(WeightError):
        LOADER.load(tmp_path)
    (tmp_path / "what").write_bytes(b"something else")
    with pytest.raises(WeightError, match="no known format"):
        LOADER.load(FileSource(tmp_path / "what"))


@pytest.mark.parametrize("names", [3, [3], ["a", None], [["a"]], b"a"])
def test_names_that_are_no_texts(tmp_path: Path, names: Any) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"a": np.zeros(3)})
    with pytest.raises(WeightError, match="named by texts"):
        WeightLoader(offline=True).load_many(tmp_path / "m.safetensors", names)


@pytest.mark.parametrize("size", [10, 5000])
def test_a_file_that_is_written_over_while_it_is_open(tmp_path: Path, size: int) -> None:
    """A look behind the end of what is mapped would end the program."""
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": np.arange(1000, dtype=np.float32)})
    opened = WeightLoader(offline=True).open(path)
    before = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(WeightError, match=f"had {before} bytes when it was opened and now has {size}"):
        opened["a"].read()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_replaced_while_it_is_open_stays_what_it_was(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": np.arange(1000, dtype=np.float32)})
    opened = WeightLoader(offline=True).open(path)
    if replaced:
        save_safetensors(path, {"a": np.zeros(7, np.float32)})
    else:
        path.unlink()
    np.testing.assert_array_equal(opened["a"].read(), np.arange(1000))


def test_a_member_that_would_become_a_thousand_times_as_much() -> None:
    """Deflate can: it is what the directory claims that counts, and nothing is made of it."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, name=np.zeros(1000))
    data = bytearray(buffer.getvalue())
    size = data.index(b"PK\x01\x02") + 24
    data[size : size + 4] = (2_000_000_000).to_bytes(4, "little")
    source = MemorySource(bytes(data), "npz")
    with pytest.raises(WeightError, match=r"claims 2000000000 bytes of \d+, which weights do not"):
        LOADER.metadata(source)


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> bytes:
        raise MemoryError

    buffer = io.BytesIO()
    np.savez_compressed(buffer, name=np.zeros(1000))
    source = MemorySource(buffer.getvalue(), "npz")
    monkeypatch.setattr(Decoded, "read", none_left)
    with pytest.raises(OutOfMemory, match="tensor 'name' of 8,000 bytes") as found:
        LOADER.load(source)
    assert (found.value.part, found.value.requested) == ("weights", 8000)
    with pytest.raises(OutOfMemory):
        LOADER.load_many(source)
