"""ONNX: the tensors of a model, found by walking the wire format; no graph is built and no data is read.

Initializers, sparse ones too, and the values of Constant nodes are given, those of the outermost graph. What lies in
the file as it lies in memory (``raw_data``, packed floats) is read in place and in part, as is external data; numbers
of variable length are decoded by the package ``onnx`` when they are asked for.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.domains import normal_domain
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, ResourceLimit, WeightError
from ranvier.formats.onnx.external import Place, file_beside, place_of
from ranvier.formats.onnx.wire import FIXED32, FIXED64, LENGTH, VARINT, Malformed, fields, varint
from ranvier.records import dataclass
from ranvier.weights.access import NotCached
from ranvier.weights.blob import Blob, Bytes, MemoryBlob, Range
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.windows import Windows
from ranvier.weights.http import Missing
from ranvier.weights.stored import MOST_AXES, Array, Decoded, Stored, TensorInfo, Weight, checked_size

# tags of the ONNX schema: the number of a field with how it is written
_MODEL_IR_VERSION, _MODEL_GRAPH, _MODEL_OPSET, _MODEL_NOTE = 1 << 3, 7 << 3 | LENGTH, 8 << 3 | LENGTH, 14 << 3 | LENGTH
_MODEL_TEXTS = {2 << 3 | LENGTH: "producer_name", 3 << 3 | LENGTH: "producer_version"}
_OPSET_DOMAIN, _OPSET_VERSION = 1 << 3 | LENGTH, 2 << 3
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1 << 3 | LENGTH, 5 << 3 | LENGTH, 15 << 3 | LENGTH
_NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = (n << 3 | LENGTH for n in (2, 4, 5, 7))
_ATTRIBUTE_NAME, _ATTRIBUTE_TENSOR, _ATTRIBUTE_SPARSE = (n << 3 | LENGTH for n in (1, 5, 22))
_SPARSE_VALUES, _SPARSE_DIMS = 1 << 3 | LENGTH, 3
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_SEGMENT, _TENSOR_LOCATION = 1, 2 << 3, 3 << 3 | LENGTH, 14 << 3
_TENSOR_TEXT, _TENSOR_NAME, _TENSOR_RAW, _TENSOR_EXTERNAL = (n << 3 | LENGTH for n in (6, 8, 9, 13))
_KEY, _VALUE = 1 << 3 | LENGTH, 2 << 3 | LENGTH
_EXTERNAL = 1  # as a location of data
_EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}

# numbers of fields that hold elements one by one, and how each is written where they are not packed
_FLOATS, _INT32S, _INT64S, _DOUBLES, _UINT64S = 4, 5, 7, 10, 11
_SINGLY = {_FLOATS: FIXED32, _INT32S: VARINT, _INT64S: VARINT, _DOUBLES: FIXED64, _UINT64S: VARINT}
_WIDTH = {_FLOATS: 4, _DOUBLES: 8}  # of those that lie there as in memory
_FIELD = {
    DType.float32: _FLOATS,
    DType.complex64: _FLOATS,
    DType.float64: _DOUBLES,
    DType.complex128: _DOUBLES,
    DType.int64: _INT64S,
    DType.uint32: _UINT64S,
    DType.uint64: _UINT64S,
}  # all others: int32_data
_LONGEST = 10  # bytes of a number of variable length

_PLAIN = {
    "value_float": DType.float32,
    "value_floats": DType.float32,
    "value_int": DType.int64,
    "value_ints": DType.int64,
    "value_string": DType.string,
    "value_strings": DType.string,
}
# what is looked at counts by its bytes against the limit of a header, but at least:
_STEP = 16  # a field: millions of two bytes take their time
_ENTRY = 256  # something with a name: what is kept of it takes more than its fields
_PER_REQUEST = 1 << 11


class Onnx:
    name = "onnx"
    suffixes = (".onnx",)
    options = ()

    def matches(self, head: bytes, name: str) -> bool:
        return name.endswith(self.suffixes)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        try:
            return _Model(blob, opening).read()
        except Malformed as error:
            raise WeightError(f"{blob.name!r} is no ONNX model, or cut off: {error}") from None


def external_files(blob: Blob) -> list[str]:
    """The files beside a model that hold data of it; none where it is no sound model, as who opens it is told."""

    def absent(name: str) -> Blob:
        raise WeightError(f"{name!r} is not to be opened")

    model = _Model(blob, Opening(lambda name: _Later(name, partial(absent, name))))
    try:
        model.read()
    except (Malformed, WeightError, ResourceLimit):
        return []
    return list(model.files)


class _Message:
    """The bytes of a file by position, and how many more of them may be looked at."""

    def __init__(self, blob: Blob, limit: int) -> None:
        self._name, self._limit, self._left = blob.name, limit, limit
        near = blob.read(0, blob.size).data if blob.near else None
        self._data = Windows(blob, limit // _PER_REQUEST) if near is None else near

    def look(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise WeightError(f"{self._name!r}: beside data, more than a header of {self._limit} bytes may have")

    def fields(self, span: Range) -> Iterator[tuple[int, Range]]:
        """Tag and place of the content of every field in a message."""
        for tag, start, body, stop in fields(self._data, *span):
            self.look(max(_STEP, (body if tag & 7 == LENGTH else stop) - start))
            yield tag, (body, stop)

    def number(self, span: Range) -> int:
        return _signed(varint(self._data, *span)[0])

    def numbers(self, span: Range) -> Iterator[int]:
        at, end = span
        while at < end:
            value, at = varint(self._data, at, end)
            yield _signed(value)

    def bytes(self, span: Range) -> bytes:
        start, stop = span
        self.look(stop - start)
        return bytes(self._data[start:stop])

    def text(self, span: Range) -> str:
        """A name: two that differ must not become one."""
        try:
            return self.bytes(span).decode()
        except UnicodeDecodeError as error:
            raise WeightError(f"{self._name!r}: a name at byte {span[0]} is no text: {error}") from None

    def entry(self, span: Range) -> tuple[str, str]:
        """A key and its value."""
        self.look(_ENTRY)
        key = value = b""
        for tag, place in self.fields(span):
            if tag == _KEY:
                key = self.bytes(place)
            elif tag == _VALUE:
                value = self.bytes(place)
        return key.decode("utf-8", "replace"), value.decode("utf-8", "replace")


def _signed(value: int) -> int:
    """A number of 64 bits with a sign."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass
class _Elements:
    """One field of elements, which may come in pieces and one by one. Of the pieces no list is kept: there may be
    millions that are empty."""

    singles: int = 0
    pieces: int = 0
    nbytes: int = 0
    start: int = 0  # of the last piece


@dataclass
class _Tensor:
    """What a tensor's message says, before any of it is believed."""

    span: Range
    name: str = ""
    element: int = 0
    dims: list[int] = field(default_factory=list)
    raw: Range | None = None
    elements: dict[int, _Elements] = field(default_factory=dict)
    texts: int = 0
    text_bytes: int = 0
    segment: bool = False
    external: bool = False
    entries: dict[str, str] = field(default_factory=dict)


class _Model:
    def __init__(self, blob: Blob, opening: Opening) -> None:
        self.blob, self.opening = blob, opening
        self.message = _Message(blob, opening.header_bytes)
        self.weights: dict[str, Weight] = {}
        self.files: dict[str, Blob] = {}

    def read(self) -> Checkpoint:
        message, notes = self.message, dict[str, Any]()
        opsets: dict[str, int] = {}
        custom: dict[str, str] = {}
        graphs = 0
        for tag, span in message.fields((0, self.blob.size)):
            if tag == _MODEL_GRAPH:
                self._graph(span)
                graphs += 1
            elif tag == _MODEL_OPSET:
                domain, version = self._opset(span)
                opsets[domain] = max(version, opsets.get(domain, version))
            elif tag == _MODEL_IR_VERSION:
                notes["ir_version"] = message.number(span)
            elif tag in _MODEL_TEXTS:
                notes[_MODEL_TEXTS[tag]] = message.bytes(span).decode("utf-8", "replace")
            elif tag == _MODEL_NOTE:
                key, value = message.entry(span)
                custom[key] = value
        if not graphs:
            raise WeightError(f"{self.blob.name!r} is no ONNX model: it holds no graph")
        if "" not in opsets and (not opsets or notes.get("ir_version", 0) < 3):  # before the standard had versions
            opsets[""] = 1
        notes |= {"opsets": opsets, **({"metadata_props": custom} if custom else {})}
        return Checkpoint(self.weights, notes, repr(self.blob.name))

    def _opset(self, span: Range) -> tuple[str, int]:
        self.message.look(_ENTRY)
        domain, version = "", 0
        for tag, place in self.message.fields(span):
            if tag == _OPSET_DOMAIN:
                domain = self.message.text(place)
            elif tag == _OPSET_VERSION:
                version = self.message.number(place)
        return normal_domain(domain), version

    def _graph(self, span: Range) -> None:
        for tag, place in self.message.fields(span):
            if tag == _GRAPH_INITIALIZER:
                tensor = self._tensor(place)
                self._add(tensor.name, self._weight(tensor, tensor.name))
            elif tag == _GRAPH_NODE:
                self._node(place)
            elif tag == _GRAPH_SPARSE:
                self._sparse(place)

    def _add(self, name: str, weight: Weight) -> None:
        if not name:
            raise WeightError(f"{self.blob.name!r}: a tensor has no name")
        if name in self.weights:
            raise WeightError(f"{self.blob.name!r}: tensor {name!r} occurs twice")
        self.message.look(_ENTRY)
        self.weights[name] = weight

    # -- Constant nodes ---------------------------------------------------------------------------------------------

    def _node(self, span: Range) -> None:
        operator = domain = b""
        outputs = attributes = 0
        output = attribute = span
        for tag, place in self.message.fields(span):
            if tag == _NODE_OPERATOR:
                operator = self._short(place)
            elif tag == _NODE_DOMAIN:
                domain = self._short(place)
            elif tag == _NODE_OUTPUT:
                output, outputs = place, outputs + 1
            elif tag == _NODE_ATTRIBUTE:
                attribute, attributes = place, attributes + 1
        if operator != b"Constant" or normal_domain(domain.decode("utf-8", "replace")) or outputs != 1:
            return
        name = self.message.text(output)
        if attributes != 1:
            raise WeightError(f"{self.blob.name!r}: Constant {name!r} has one value, this has {attributes}")
        self._constant(name, attribute)

    def _short(self, span: Range) -> bytes:
        """The name of an operator or a domain; one that is long is none of those that are looked for."""
        return self.message.bytes(span) if span[1] - span[0] <= len("Constant") else b"?"

    def _constant(self, name: str, span: Range) -> None:
        kind, found = "", dict[int, Range]()
        for tag, place in self.message.fields(span):
            if tag == _ATTRIBUTE_NAME:
                kind = self.message.text(place)
            elif tag in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_SPARSE):
                if tag in found:
                    raise WeightError(f"{self.blob.name!r}: Constant {name!r} has two values")
                found[tag] = place
        if kind == "value" and _ATTRIBUTE_TENSOR in found:
            self._add(name, self._weight(self._tensor(found[_ATTRIBUTE_TENSOR]), name))
        elif kind == "sparse_value" and _ATTRIBUTE_SPARSE in found:
            self._sparse(found[_ATTRIBUTE_SPARSE], name)
        elif kind in _PLAIN:
            array = _plain(self.message.bytes(span), _PLAIN[kind], f"{self.blob.name!r}: Constant {name!r}")
            info = TensorInfo(name, _PLAIN[kind], array.shape, array.nbytes, source=self.blob.name)
            array.flags.writeable = False
            self._add(name, Decoded(info, lambda: array))
        else:
            raise WeightError(f"{self.blob.name!r}: Constant {name!r} has no value, but {kind!r}")

    # -- tensors ----------------------------------------------------------------------------------------------------

    def _tensor(self, span: Range) -> _Tensor:
        message, found = self.message, _Tensor(span)
        for tag, place in message.fields(span):
            number, kind = tag >> 3, tag & 7
            if number == _TENSOR_DIMS:
                self._dims(kind, place, found.dims)
            elif number in _SINGLY:
                elements = found.elements.setdefault(number, _Elements())
                if kind == LENGTH:
                    elements.start = place[0]
                    elements.pieces += 1
                    elements.nbytes += place[1] - place[0]
                elif kind == _SINGLY[number]:
                    elements.singles += 1
            elif tag == _TENSOR_TYPE:
                found.element = message.number(place)
            elif tag == _TENSOR_NAME:
                found.name = message.text(place)
            elif tag == _TENSOR_RAW:
                found.raw = place
            elif tag == _TENSOR_TEXT:
                found.texts += 1
                found.text_bytes += place[1] - place[0]
            elif tag == _TENSOR_SEGMENT:
                found.segment = True
            elif tag == _TENSOR_LOCATION:
                found.external = message.number(place) == _EXTERNAL
            elif tag == _TENSOR_EXTERNAL:
                key, value = message.entry(place)
                if key in _EXTERNAL_KEYS:
                    found.entries[key] = value
        return found

    def _dims(self, kind: int, span: Range, dims: list[int]) -> None:
        """Add sizes, packed or one; of too many one more is kept than there may be, and refused by its count."""
        if kind in (VARINT, LENGTH):
            dims.extend(itertools.islice(self.message.numbers(span), MOST_AXES + 1 - len(dims)))

    def _info(self, name: str, element: int, shape: Sequence[int]) -> TensorInfo:
        try:
            dtype = dtypes.from_onnx(element)
        except DTypeMismatch:
            raise WeightError(f"{self.blob.name!r}: tensor {name!r} has the unknown element type {element}") from None
        nbytes = checked_size(name, shape, dtype.bits, self.opening.tensor_bytes)
        return TensorInfo(name, dtype, tuple(shape), nbytes, source=self.blob.name)

    def _weight(self, tensor: _Tensor, name: str) -> Weight:
        info = self._info(name, tensor.element, tensor.dims)
        if tensor.segment:
            raise WeightError(f"{self.blob.name!r}: tensor {name!r} is in segments, which nothing writes or reads")
        if info.dtype is DType.string:
            return self._strings(tensor, info)
        if tensor.external:
            return self._external(tensor, info)
        if tensor.raw is None:
            return self._typed(tensor, info)
        self._check_length(info, tensor.raw[1] - tensor.raw[0])
        return Stored(info, self.blob, tensor.raw[0])

    def _check_length(self, info: TensorInfo, length: int) -> None:
        if length != info.nbytes:
            kind = f"{info.dtype}{list(info.shape)}"
            raise WeightError(
                f"{self.blob.name!r}: tensor {info.name!r}: {kind} takes {info.nbytes} bytes, its data has {length}"
            )

    def _strings(self, tensor: _Tensor, info: TensorInfo) -> Weight:
        if tensor.external or tensor.raw is not None:
            raise WeightError(f"{self.blob.name!r}: tensor {info.name!r}: strings cannot be stored as raw data")
        self._check_count(info, info.size, tensor.texts, tensor.texts)
        told = TensorInfo(info.name, info.dtype, info.shape, tensor.text_bytes, source=info.source)
        return Decoded(told, partial(_decoded, self.blob, tensor.span, told))

    def _typed(self, tensor: _Tensor, info: TensorInfo) -> Weight:
        """Numbers in a field of their own kind. Each of int32_data holds one element, or a byte of small ones."""
        number = _FIELD.get(info.dtype, _INT32S)
        found = tensor.elements.get(number, _Elements())
        wanted = info.nbytes if info.dtype.bits in (2, 4) else info.size * (2 if info.dtype.is_complex else 1)
        width = _WIDTH.get(number)
        if width is None:
            least = found.singles + -(-found.nbytes // _LONGEST)
            self._check_count(info, wanted, least, found.singles + found.nbytes)
        elif found.nbytes % width:
            raise WeightError(f"{self.blob.name!r}: tensor {info.name!r}: {found.nbytes} bytes of numbers of {width}")
        else:
            count = found.singles + found.nbytes // width
            self._check_count(info, wanted, count, count)
        if info.size == 0 or (width is not None and (found.pieces, found.singles) == (1, 0)):
            return Stored(info, self.blob, found.start)
        return Decoded(info, partial(_decoded, self.blob, tensor.span, info))

    def _check_count(self, info: TensorInfo, wanted: int, least: int, most: int) -> None:
        if not least <= wanted <= most:
            have = str(most) if least == most else f"{least} to {most}"
            kind = f"{info.dtype}{list(info.shape)}"
            raise WeightError(
                f"{self.blob.name!r}: tensor {info.name!r}: {kind} takes {wanted} values, its data has {have}"
            )

    def _sparse(self, span: Range, name: str = "") -> None:
        """A tensor of zeros with some values; an initializer has the name of its values."""
        dims: list[int] = []
        values = None
        for tag, place in self.message.fields(span):
            if tag == _SPARSE_VALUES:
                if values is not None:
                    raise WeightError(f"{self.blob.name!r}: sparse tensor {values.name!r} has its values twice")
                values = self._tensor(place)
            elif tag >> 3 == _SPARSE_DIMS:
                self._dims(tag & 7, place, dims)
        if values is None:
            raise WeightError(f"{self.blob.name!r}: sparse tensor {name!r} has no values")
        info = self._info(name or values.name, values.element, dims)
        self._add(info.name, Decoded(info, partial(_dense, self.blob, span, info)))

    # -- external data ----------------------------------------------------------------------------------------------

    def _external(self, tensor: _Tensor, info: TensorInfo) -> Weight:
        place = place_of(tensor.entries, info.nbytes, info.name)
        self._check_length(info, place.length)
        file = self._file(place, info.name)
        if file.near:
            place.check_inside(file.size, info.name)
        if place.checksum:
            return Decoded(info, partial(_verified, file, place, info))
        return Stored(info, file, place.offset)

    def _file(self, place: Place, tensor: str) -> Blob:
        found = self.files.get(place.location)
        if found is None:
            self.message.look(_ENTRY)
            found = self.files[place.location] = self._opened(place.location, tensor)
        return found

    def _opened(self, location: str, tensor: str) -> Blob:
        """A file on this machine from the model's folder, any other from its source."""
        model: Path | None = getattr(self.blob, "path", None)
        path = None if model is None else file_beside(model, location, tensor)
        if path is not None:
            return MemoryBlob.of_file(path)
        if "\\" in location:  # the machine at the other end may take it for a folder's end, and '..' between two
            raise WeightError(f"tensor {tensor!r}: external location {location!r} must be a path with '/'")
        if self.blob.near:
            return self._beside(location, tensor)
        return _Later(location, lambda: self._beside(location, tensor))

    def _beside(self, location: str, tensor: str) -> Blob:
        try:
            return self.opening.beside(location, self.blob.name)
        except WeightError as error:
            kind = type(error)
            if kind not in (WeightError, Missing, NotCached):  # the network, or who stopped it, is not about the model
                raise
            raise kind(f"tensor {tensor!r}: external file {location!r} cannot be had: {error}") from error


class _Later:
    """A file beside a model far away, opened when its bytes are wanted: there may be one for every tensor."""

    near = False

    def __init__(self, name: str, opened: Callable[[], Blob]) -> None:
        self.name = name
        self._opened, self._lock = opened, threading.Lock()
        self._found: Blob | None = None

    def _blob(self) -> Blob:
        with self._lock:
            if self._found is None:
                self._found = self._opened()
            return self._found

    @property
    def size(self) -> int:
        return self._blob().size

    def read(self, start: int, stop: int) -> Bytes:
        return self._blob().read(start, stop)

    def read_many(self, ranges: Sequence[Range]) -> list[Bytes]:
        return self._blob().read_many(ranges)


def _verified(file: Blob, place: Place, info: TensorInfo) -> Array:
    data = file.read(place.offset, place.stop)
    place.check_sum(data, info.name)
    return Stored(info, MemoryBlob(file.name, data), 0).read()


def _decoded(blob: Blob, span: Range, info: TensorInfo) -> Array:
    from onnx import TensorProto, numpy_helper  # not for everybody: most tensors lie there as in memory

    try:
        tensor = TensorProto.FromString(bytes(blob.read(*span)))
        if tensor.data_location == TensorProto.EXTERNAL:  # the package would open files by itself
            raise WeightError(f"tensor {info.name!r}: its data is said to be external in two ways")
        if info.dtype is DType.string:
            return _texts(tensor.string_data).reshape(info.shape)
        array: Array = numpy_helper.to_array(tensor)
    except WeightError:
        raise
    except Exception as error:  # those of the parser are of many kinds
        raise WeightError(f"tensor {info.name!r} cannot be decoded: {error!r}") from None
    return array


def _texts(texts: Sequence[bytes]) -> Array:
    found = np.empty(len(texts), object)
    found[:] = [text.decode("utf-8", "replace") for text in texts]
    return found


def _plain(data: bytes, dtype: DType, label: str) -> Array:
    """The value of a Constant that is a number, a text, or a list of them."""
    from onnx import AttributeProto, helper

    try:
        value = helper.get_attribute_value(AttributeProto.FromString(data))
        if dtype is DType.string:
            return _texts(value) if isinstance(value, list) else _texts([value]).reshape(())
        return np.array(value, dtype.numpy)
    except Exception as error:
        raise WeightError(f"{label} has a value that cannot be decoded: {error!r}") from None


def _dense(blob: Blob, span: Range, info: TensorInfo) -> Array:
    from onnx import SparseTensorProto

    from ranvier.ops.proto import sparse_array  # with all operators; sparse tensors are rare

    try:
        return sparse_array(SparseTensorProto.FromString(bytes(blob.read(*span))))
    except (WeightError, ResourceLimit):
        raise
    except Exception as error:
        raise WeightError(f"sparse tensor {info.name!r} cannot be decoded: {error!r}") from None
