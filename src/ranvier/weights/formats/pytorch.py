"""PyTorch's ``.pt`` and ``.pth`` without PyTorch: the archive of today, and the stream of before version 1.6.

The pickle inside is read as data (``pickles.py``); of the names it may call only those that rebuild tensors mean
something. Offsets, sizes and strides of every tensor are checked against the bytes of its storage.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.numpy_files import member_data, open_zip
from ranvier.weights.formats.pickles import Call, Global, read_pickle
from ranvier.weights.stored import Stored, TensorInfo, Weight, checked_size

_STORAGES = {
    "DoubleStorage": DType.float64,
    "FloatStorage": DType.float32,
    "HalfStorage": DType.float16,
    "BFloat16Storage": DType.bfloat16,
    "LongStorage": DType.int64,
    "IntStorage": DType.int32,
    "ShortStorage": DType.int16,
    "CharStorage": DType.int8,
    "ByteStorage": DType.uint8,
    "BoolStorage": DType.bool,
    "ComplexFloatStorage": DType.complex64,
    "ComplexDoubleStorage": DType.complex128,
    "UntypedStorage": DType.uint8,
}
_DTYPES = {
    "float64": DType.float64,
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
    "int64": DType.int64,
    "int32": DType.int32,
    "int16": DType.int16,
    "int8": DType.int8,
    "uint8": DType.uint8,
    "uint16": DType.uint16,
    "uint32": DType.uint32,
    "uint64": DType.uint64,
    "bool": DType.bool,
    "complex64": DType.complex64,
    "complex128": DType.complex128,
    "float8_e4m3fn": DType.float8_e4m3fn,
    "float8_e4m3fnuz": DType.float8_e4m3fnuz,
    "float8_e5m2": DType.float8_e5m2,
    "float8_e5m2fnuz": DType.float8_e5m2fnuz,
    "float8_e8m0fnu": DType.float8_e8m0fnu,
}
_PLAIN = {"collections.OrderedDict", "torch.Size", "torch.device", "builtins.set", "__builtin__.set"}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_DEEPEST, _MOST_STEPS = 64, 2_000_000


@dataclass(frozen=True)
class _Storage:
    """Elements that tensors are views of."""

    dtype: DType
    key: str
    count: int


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it."""

    storage: _Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PyTorch:
    name = "pytorch"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")

    def matches(self, head: bytes, name: str) -> bool:
        zipped = head.startswith(b"PK\x03\x04") and not name.endswith(".npz")
        return zipped or (head[:1] == b"\x80" and bytes.fromhex("6cfc9c46f9206aa85019") in head[:64])

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        if bytes(blob.read(0, min(4, blob.size))) == b"PK\x03\x04":
            return _archive(blob, opening)
        return _stream(blob, opening)


def _archive(blob: Blob, opening: Opening) -> Checkpoint:
    archive = open_zip(blob)
    members = {member.filename: member for member in archive.infolist()}
    programs = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(programs) != 1 or len(members) != len(archive.infolist()):
        raise WeightError(f"{blob.name!r} is no PyTorch checkpoint: one data.pkl expected, {len(programs)} found")
    if f"{programs[0].removesuffix('data.pkl')}constants.pkl" in members:
        raise WeightError(f"{blob.name!r} is a TorchScript program; export its state_dict or an ONNX model")
    root, program = programs[0].removesuffix("data.pkl"), members[programs[0]]
    if program.file_size > opening.header_bytes or program.compress_type:
        raise WeightError(f"{blob.name!r}: data.pkl has {program.file_size} bytes, or is compressed")

    def text(name: str) -> str:
        member = members.get(root + name)
        if member is None or member.file_size > 64:
            return ""
        start = member_data(blob, member)
        return bytes(blob.read(start, start + member.file_size)).decode("ascii", "replace")

    def place(storage: _Storage) -> int:
        member = members.get(f"{root}data/{storage.key}")
        if member is None:
            raise WeightError(f"{blob.name!r} has no data for storage {storage.key!r}")
        if member.compress_type or member.file_size < storage.count * storage.dtype.numpy.itemsize:
            raise WeightError(f"{blob.name!r}: storage {storage.key!r} is compressed or cut off")
        return member_data(blob, member)

    start = member_data(blob, program)
    stream = io.BytesIO(bytes(blob.read(start, start + program.file_size)))
    tree = read_pickle(stream, repr(blob.name), _call(blob.name), _storage_of(blob.name))
    big = text("byteorder").strip() == "big"
    return _checkpoint(blob, tree, place, opening, big)


def _stream(blob: Blob, opening: Opening) -> Checkpoint:
    """Five pickles (magic number, version, system, the tree, keys of storages), then the storages."""
    label = repr(blob.name)
    stream = io.BytesIO(bytes(blob.read(0, min(blob.size, opening.header_bytes))))
    storages: dict[str, _Storage] = {}

    def persistent(identity: Any) -> _Storage:
        found = _storage_of(blob.name)(identity)
        return storages.setdefault(found.key, found)

    def following() -> Any:
        return read_pickle(stream, label, _call(blob.name), persistent)

    if following() != _LEGACY_MAGIC or following() != _LEGACY_PROTOCOL:
        raise WeightError(f"{label} is no PyTorch checkpoint")
    system = following()
    tree, keys = following(), following()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise WeightError(f"{label}: the list of storages is not one")
    places: dict[str, int] = {}
    at = stream.tell()
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise WeightError(f"{label}: storage {key!r} belongs to no tensor")
        if int.from_bytes(bytes(blob.read(at, at + 8)), "little") != storage.count:
            raise WeightError(f"{label}: storage {key!r} has another size than its tensors expect")
        places[key] = at + 8
        at += 8 + storage.count * storage.dtype.numpy.itemsize
    if at > blob.size:
        raise WeightError(f"{label} is cut off: {at} bytes needed, {blob.size} there")

    def place(storage: _Storage) -> int:
        if storage.key not in places:
            raise WeightError(f"{label} has no data for storage {storage.key!r}")
        return places[storage.key]

    big = isinstance(system, dict) and system.get("little_endian") is False
    return _checkpoint(blob, tree, place, opening, big)


def _storage_of(file: str) -> Callable[[Any], _Storage]:
    def persistent(identity: Any) -> _Storage:
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise WeightError(f"{file!r}: the pickle refers to {identity!r}, which is no storage")
        _, kind, key, _, count = identity[:5]
        if len(identity) > 5 and identity[5] is not None:
            raise WeightError(f"{file!r}: storage {key!r} is a view of another, as versions before 0.4 wrote them")
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
        if name not in _STORAGES or not isinstance(key, str) or type(count) is not int or count < 0:
            raise WeightError(f"{file!r}: storage {key!r} of the unknown kind {name or kind!r}")
        return _Storage(_STORAGES[name], key, count)

    return persistent


def _call(file: str) -> Callable[[str, tuple[Any, ...]], Any]:
    def call(function: str, arguments: tuple[Any, ...]) -> Any:
        if function == "collections.OrderedDict":
            if arguments and not isinstance(arguments[0], list):
                raise WeightError(f"{file!r}: the pickle makes an OrderedDict of {type(arguments[0]).__name__}")
            return dict(arguments[0]) if arguments else {}
        if function in _PLAIN:
            return Call(function, arguments)
        if function == "torch._utils._rebuild_parameter":
            return arguments[0]
        if function in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return _view(file, function, arguments)
        raise WeightError(f"{file!r}: the pickle calls {function}, which a file of weights has no need of")

    return call


def _view(file: str, function: str, arguments: tuple[Any, ...]) -> _View:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage):
        raise WeightError(f"{file!r}: a tensor without a storage")
    dtype = storage.dtype
    if function.endswith("_v3"):
        named = arguments[6].name if len(arguments) > 6 and isinstance(arguments[6], Global) else ""
        if named.rpartition(".")[2] not in _DTYPES:
            raise WeightError(f"{file!r}: a tensor of the unknown element type {named!r}")
        dtype = _DTYPES[named.rpartition(".")[2]]
    if isinstance(shape, Call):
        shape = shape.arguments[0]
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(x) is not int or x < 0 for x in numbers):
        raise WeightError(f"{file!r}: a tensor of offset {offset!r}, shape {shape!r}, strides {strides!r}")
    return _View(storage, dtype, offset, tuple(shape), tuple(strides))


def _checkpoint(blob: Blob, tree: Any, place: Callable[[_Storage], int], opening: Opening, big: bool) -> Checkpoint:
    found = _tensors(tree, blob.name)
    weights: dict[str, Weight] = {}
    for name, view in found.items():
        item = view.dtype.numpy.itemsize
        checked_size(name, view.shape, item * 8, opening.tensor_bytes)
        count = math.prod(view.shape)
        reach = view.offset + (1 + sum((d - 1) * s for d, s in zip(view.shape, view.strides)) if count else 0)
        if reach * item > view.storage.count * view.storage.dtype.numpy.itemsize:
            raise WeightError(
                f"{blob.name!r}: tensor {name!r} reaches to element {reach} of a storage of {view.storage.count}"
            )
        info = TensorInfo(name, view.dtype, view.shape, count * item, source=blob.name)
        weights[name] = Stored(info, blob, place(view.storage) + view.offset * item, view.strides, big)
    return Checkpoint(weights, {}, repr(blob.name))


def _tensors(tree: Any, file: str) -> dict[str, _View]:
    """Tensors of nested dictionaries and lists, by the names that lead to them."""
    found: dict[str, _View] = {}
    left = [("", tree, 0)]
    steps = 0
    while left:
        name, item, depth = left.pop()
        steps += 1
        # what refers to itself, or to one thing again and again, would never end
        if depth > _DEEPEST or steps > _MOST_STEPS:
            raise WeightError(f"{file!r}: more than {_DEEPEST} levels, or than {_MOST_STEPS} entries")
        if isinstance(item, _View):
            found[name or "tensor"] = item
            continue
        pairs: Any = ()
        if isinstance(item, Mapping):
            pairs = item.items()
        elif isinstance(item, list | tuple):
            pairs = enumerate(item)
        inner = [(f"{name}.{key}" if name else str(key), value, depth + 1) for key, value in pairs]
        left += [each for each in reversed(inner) if isinstance(each[1], _View | Mapping | list | tuple)]
    return found
