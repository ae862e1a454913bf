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
from ranvier.weights.blob import Blob, BlobReader
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.pickles import Call, Global, mapping, read_pickle, shown
from ranvier.weights.formats.zips import Member, open_zip
from ranvier.weights.stored import Stored, TensorInfo, Weight, checked_size, row_major

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
    "float4_e2m1fn_x2": DType.float4_e2m1fn,  # its shapes count pairs
}
# what stands beside tensors in checkpoints; the values are of no use here, and nothing is made of them
_ASIDE = {
    "__builtin__.bytearray", "__builtin__.complex", "__builtin__.set", "_codecs.encode", "argparse.Namespace",
    "builtins.bytearray", "builtins.complex", "builtins.set", "datetime.date", "datetime.datetime",
    "datetime.timedelta", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy.dtype", "pathlib.PosixPath",
    "pathlib.WindowsPath", "torch.Size", "torch.device",
}  # fmt: skip
_DICTIONARIES = {"collections.Counter", "collections.OrderedDict", "collections.defaultdict"}
_REBUILD = "torch._utils._rebuild_tensor_v"
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_TYPES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_COUNT = 8  # bytes before a storage that say how many elements it has
_DEEPEST, _MOST_STEPS = 64, 2_000_000
_NAME_OF_A_STEP = 64  # characters of a name that count as one step more: names repeat those they are under


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


_HOLDERS = (_View, Mapping, list, tuple)  # a tensor, and what may hold some


class PyTorch:
    name = "pytorch"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")
    options = ()

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
        found = Member(blob, member)
        return bytes(found.read(0, found.size)).decode("ascii", "replace")

    opened: dict[str, Member] = {}

    def place(storage: _Storage) -> tuple[Blob, int]:
        member = members.get(f"{root}data/{storage.key}")
        if member is None:
            raise WeightError(f"{blob.name!r} has no data for storage {storage.key!r}")
        if member.file_size < storage.count * storage.dtype.numpy.itemsize:
            raise WeightError(f"{blob.name!r}: storage {storage.key!r} is cut off")
        if storage.key not in opened:
            opened[storage.key] = Member(blob, member)
        return opened[storage.key], 0

    found = Member(blob, program)
    stream = io.BytesIO(bytes(found.read(0, found.size)))
    tree = read_pickle(stream, repr(blob.name), _call(blob.name), _storage_of(blob.name))
    big = text("byteorder").strip() == "big"
    return _checkpoint(blob, tree, place, opening, big)


def _stream(blob: Blob, opening: Opening) -> Checkpoint:
    """Five pickles (magic number, version, system, the tree, keys of storages), then the storages."""
    label = repr(blob.name)
    stream: Any = BlobReader(blob, opening.header_bytes)
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
        if key not in storages:
            raise WeightError(f"{label}: storage {key!r} belongs to no tensor")
        places[key] = at + _COUNT
        at += _COUNT + storages[key].count * storages[key].dtype.numpy.itemsize
    if at > blob.size:
        raise WeightError(f"{label} is cut off: {at} bytes needed, {blob.size} there")
    counts = blob.read_many([(start - _COUNT, start) for start in places.values()])
    for key, count in zip(places, counts):
        if int.from_bytes(bytes(count), "little") != storages[key].count:
            raise WeightError(f"{label}: storage {key!r} has another size than its tensors expect")

    def place(storage: _Storage) -> tuple[Blob, int]:
        if storage.key not in places:
            raise WeightError(f"{label} has no data for storage {storage.key!r}")
        return blob, places[storage.key]

    big = isinstance(system, dict) and system.get("little_endian") is False
    return _checkpoint(blob, tree, place, opening, big)


def _storage_of(file: str) -> Callable[[Any], _Storage]:
    def persistent(identity: Any) -> _Storage:
        if isinstance(identity, tuple) and identity[:1] == ("module",):
            raise WeightError(f"{file!r} holds a whole module, which is a program; save its state_dict")
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise WeightError(f"{file!r}: the pickle refers to {shown(identity)}, which is no storage")
        _, kind, key, _, count = identity[:5]
        if len(identity) > 5 and identity[5] is not None:
            raise WeightError(f"{file!r}: storage {shown(key)} is a view of another, as versions before 0.4 wrote them")
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
        if name not in _STORAGES or not isinstance(key, str) or type(count) is not int or count < 0:
            raise WeightError(f"{file!r}: storage {shown(key)} of the unknown kind {name or shown(kind)}")
        return _Storage(_STORAGES[name], key, count)

    return persistent


def _call(file: str) -> Callable[[str, tuple[Any, ...]], Any]:
    def call(function: str, arguments: tuple[Any, ...]) -> Any:
        if function in _DICTIONARIES:
            # of pairs, of a dictionary, of nothing; a defaultdict first of all of what makes its defaults
            given = (*arguments, [])[function == "collections.defaultdict" and len(arguments) > 0]
            if not isinstance(given, list | dict):
                raise WeightError(f"{file!r}: the pickle makes a dictionary of {shown(given)}")
            return mapping(given.items() if isinstance(given, dict) else given)
        if function in _ASIDE:
            return Call(function, arguments)
        if function in _PARAMETERS:
            return arguments[0]
        if function in (f"{_REBUILD}2", f"{_REBUILD}3"):
            return _view(file, function, arguments)
        if function == _OF_TYPE:  # a tensor with attributes, or of a class of its own, whose meaning is not ours
            inner, kind, given = arguments[:3]
            if (
                isinstance(inner, Global)
                and isinstance(kind, Global)
                and kind.name in _TYPES
                and inner.name != _OF_TYPE
            ):
                return call(inner.name, given)
            raise WeightError(f"{file!r}: the pickle has a tensor of the unknown class {shown(kind)}")
        raise WeightError(
            f"{file!r}: the pickle calls {function[:100]}, which a file of weights has no need of; "
            "save a state_dict, or tensors alone"
        )

    return call


def _view(file: str, function: str, arguments: tuple[Any, ...]) -> _View:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage):
        raise WeightError(f"{file!r}: a tensor without a storage")
    dtype, others = storage.dtype, arguments[6:]
    if function == f"{_REBUILD}3":
        named = others[0].name if others and isinstance(others[0], Global) else ""
        if named.rpartition(".")[2] not in _DTYPES:
            raise WeightError(f"{file!r}: a tensor of the unknown element type {named!r}")
        dtype, others = _DTYPES[named.rpartition(".")[2]], others[1:]
    if others and isinstance(others[0], dict) and (others[0].get("conj") or others[0].get("neg")):
        raise WeightError(f"{file!r}: a tensor that is yet to be conjugated or negated; save it after resolve_conj()")
    if isinstance(shape, Call):
        shape = shape.arguments[0]
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(x) is not int or x < 0 for x in numbers):
        raise WeightError(f"{file!r}: a tensor whose offset, shape and strides are not whole numbers that fit together")
    shape, strides = tuple(shape), tuple(strides)
    if dtype.is_packed:
        if not shape or strides != row_major(shape):
            raise WeightError(f"{file!r}: a tensor of pairs of {dtype} that do not lie one after another")
        return _View(storage, dtype, offset, (*shape[:-1], 2 * shape[-1]), ())
    return _View(storage, dtype, offset, shape, strides)


def _checkpoint(
    blob: Blob, tree: Any, place: Callable[[_Storage], tuple[Blob, int]], opening: Opening, big: bool
) -> Checkpoint:
    weights: dict[str, Weight] = {}
    for name, view in _tensors(tree, blob.name).items():
        item = view.dtype.numpy.itemsize
        nbytes = checked_size(name, view.shape, view.dtype.bits, opening.tensor_bytes)
        count = math.prod(view.shape)
        within = 1 + sum((d - 1) * s for d, s in zip(view.shape, view.strides)) if view.strides else nbytes // item
        reach = view.offset + (within if count else 0)
        if reach * item > view.storage.count * view.storage.dtype.numpy.itemsize:
            raise WeightError(
                f"{blob.name!r}: tensor {name!r} reaches to element {reach} of a storage of {view.storage.count}"
            )
        info = TensorInfo(name, view.dtype, view.shape, nbytes, source=blob.name)
        inside, start = place(view.storage)
        weights[name] = Stored(info, inside, start + view.offset * item, view.strides, big)
    return Checkpoint(weights, {}, repr(blob.name))


def _tensors(tree: Any, file: str) -> dict[str, _View]:
    """Tensors of nested dictionaries and lists, by the names that lead to them."""
    found: dict[str, _View] = {}
    left = [("", tree, 0)] if isinstance(tree, _HOLDERS) else []
    steps = 0
    while left:
        name, item, depth = left.pop()
        if isinstance(item, _View):
            if found.setdefault(name or "tensor", item) is not item:
                raise WeightError(f"{file!r}: two tensors have the name {name!r}")
            continue
        pairs: Any = item.items() if isinstance(item, Mapping) else enumerate(item)
        inner = [(key, value) for key, value in pairs if isinstance(value, _HOLDERS)]
        steps += len(inner) * (1 + len(name) // _NAME_OF_A_STEP)
        # what refers to itself, or to one thing again and again, would never end
        if (inner and depth == _DEEPEST) or steps > _MOST_STEPS:
            raise WeightError(f"{file!r}: more than {_DEEPEST} levels, or than {_MOST_STEPS} entries")
        left += [(f"{name}.{key}" if name else str(key), value, depth + 1) for key, value in reversed(inner)]
    return found
