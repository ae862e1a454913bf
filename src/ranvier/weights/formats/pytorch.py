"""PyTorch's ``.pt`` and ``.pth`` without PyTorch: the archive of today, the stream of before version 1.6, and what a
TorchScript program keeps beside its code.

The pickle inside is read as data (``pickles.py``); of the names it may call only those that rebuild tensors mean
something (``torch_names.py``). Offsets, sizes and strides of every tensor are checked against the bytes of its storage.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ranvier.errors import WeightError
from ranvier.weights.blob import Blob, BlobReader, read_gathered
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.pickles import read_pickle
from ranvier.weights.formats.torch_names import Storage, View, rebuilt, scripted, storage_of
from ranvier.weights.formats.zips import Member, open_zip
from ranvier.weights.stored import Stored, TensorInfo, Weight, checked_size

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_CONSTANTS = "constants"  # of a TorchScript program: tensors its code names by number
_COUNT = 8  # bytes before a storage that say how many elements it has
_DEEPEST, _MOST_STEPS = 64, 500_000
_NAME_OF_A_STEP = 64  # characters of a name that count as one step more: names repeat those they are under
_HOLDERS = (View, Mapping, list, tuple)  # a tensor, and what may hold some


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
    archive = open_zip(blob, opening.header_bytes)
    members = {member.filename: member for member in archive.infolist()}
    programs = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if any(name.endswith("/.data/python_version") for name in members):
        raise WeightError(f"{blob.name!r} is a package of torch.package, models with their code; save a state_dict")
    if len(programs) != 1 or len(members) != len(archive.infolist()):
        raise WeightError(f"{blob.name!r} is no PyTorch checkpoint: one data.pkl expected, {len(programs)} found")
    root = programs[0].removesuffix("data.pkl")
    is_script = f"{root}{_CONSTANTS}.pkl" in members

    def text(name: str) -> str:
        member = members.get(root + name)
        if member is None or member.file_size > 64:
            return ""
        found = Member(blob, member)
        return bytes(found.read(0, found.size)).decode("ascii", "replace")

    opened: dict[str, Member] = {}

    def place(storage: Storage) -> tuple[Blob, int]:
        inside = "" if is_script and storage.key.startswith(f"{_CONSTANTS}/") else "data/"
        member = members.get(f"{root}{inside}{storage.key}")
        if member is None:
            raise WeightError(f"{blob.name!r} has no data for storage {storage.key!r}")
        if member.file_size < storage.count * storage.dtype.numpy.itemsize:
            raise WeightError(f"{blob.name!r}: storage {storage.key!r} is cut off")
        if storage.key not in opened:
            opened[storage.key] = Member(blob, member)
        return opened[storage.key], 0

    def pickled(name: str, persistent: Callable[[Any], Storage]) -> Any:
        member = members[f"{root}{name}.pkl"]
        if member.file_size > opening.header_bytes or member.compress_type:
            raise WeightError(f"{blob.name!r}: {name}.pkl has {member.file_size} bytes, or is compressed")
        found = Member(blob, member)
        stream = io.BytesIO(bytes(found.read(0, found.size)))
        return read_pickle(stream, repr(blob.name), (scripted if is_script else rebuilt)(blob.name), persistent)

    storage = storage_of(blob.name)

    def constant(identity: Any) -> Storage:
        found = storage(identity)
        return replace(found, key=f"{_CONSTANTS}/{found.key}")

    tree = pickled("data", storage)
    if is_script:
        constants = pickled(_CONSTANTS, constant)
        if isinstance(tree, dict) and _CONSTANTS not in tree:
            tree[_CONSTANTS] = constants
    big = text("byteorder").strip() == "big"
    return _checkpoint(blob, tree, place, opening, big)


def _stream(blob: Blob, opening: Opening) -> Checkpoint:
    """Five pickles (magic number, version, system, the tree, keys of storages), then the storages."""
    label = repr(blob.name)
    stream: Any = BlobReader(blob, opening.header_bytes)
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        found = storage_of(blob.name)(identity)
        return storages.setdefault(found.key, found)

    def following() -> Any:
        return read_pickle(stream, label, rebuilt(blob.name), persistent)

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
    counts = read_gathered(blob, [(start - _COUNT, start) for start in places.values()])
    for key, count in zip(places, counts):
        if int.from_bytes(bytes(count), "little") != storages[key].count:
            raise WeightError(f"{label}: storage {key!r} has another size than its tensors expect")

    def place(storage: Storage) -> tuple[Blob, int]:
        if storage.key not in places:
            raise WeightError(f"{label} has no data for storage {storage.key!r}")
        return blob, places[storage.key]

    big = isinstance(system, dict) and system.get("little_endian") is False
    return _checkpoint(blob, tree, place, opening, big)


def _checkpoint(
    blob: Blob, tree: Any, place: Callable[[Storage], tuple[Blob, int]], opening: Opening, big: bool
) -> Checkpoint:
    weights: dict[str, Weight] = {}
    for name, view in _tensors(tree, blob.name).items():
        item = view.dtype.numpy.itemsize
        nbytes = checked_size(name, view.shape, view.dtype.bits, opening.tensor_bytes)
        within = 1 + sum((d - 1) * s for d, s in zip(view.shape, view.strides)) if view.strides else nbytes // item
        reach = view.offset + within
        # one without elements may begin anywhere: behind all of the storage, where it is the end of a stepped one
        if math.prod(view.shape) and reach * item > view.storage.count * view.storage.dtype.numpy.itemsize:
            raise WeightError(
                f"{blob.name!r}: tensor {name!r} reaches to element {reach} of a storage of {view.storage.count}"
            )
        info = TensorInfo(name, view.dtype, view.shape, nbytes, source=blob.name)
        inside, start = place(view.storage)
        weights[name] = Stored(info, inside, start + view.offset * item, view.strides, big)
    return Checkpoint(weights, {}, repr(blob.name))


def _tensors(tree: Any, file: str) -> dict[str, View]:
    """Tensors of nested dictionaries and lists, by the names that lead to them."""
    found: dict[str, View] = {}
    left = [("", tree, 0)] if isinstance(tree, _HOLDERS) else []
    steps = 0
    while left:
        name, item, depth = left.pop()
        if isinstance(item, View):
            if not _is_text(name):
                raise WeightError(f"{file!r}: a tensor whose name is no text: {name!r}")
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


def _is_text(name: str) -> bool:
    """Not where it holds half of a pair of characters, which a pickle may and nothing else can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
