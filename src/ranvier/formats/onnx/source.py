"""A path, bytes, an open file or a message: as a parsed model whose weights stay where they are."""

from __future__ import annotations

import os
import re
from dataclasses import field
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from ranvier.config import Limits
from ranvier.errors import InvalidModel, ResourceLimit
from ranvier.formats.onnx.scan import Malformed, skeleton
from ranvier.formats.onnx.weights import Piece, WeightFiles
from ranvier.memory.mapping import mapped
from ranvier.memory.opened import Opened
from ranvier.records import dataclass

_TEXT_FORMATS = {".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".txtpb", ".json", ".onnxjson"}

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|=>|[()\[\]{}<>]')
_BRACKETS = 8  # a text format may open for one level of a graph
_DEEPEST = 64  # levels for which a stack certainly has room


@dataclass
class Source:
    """A model message with, by position of the initializer, the weights that were cut out of it."""

    proto: ModelProto
    files: WeightFiles
    cut: dict[int, Piece] = field(default_factory=dict)
    label: str = "model"
    nbytes: int = 0


def open_source(model: Any, limits: Limits, base_dir: str | os.PathLike[str] | None = None) -> Source:
    """Parse ``model``; InvalidModel names it when it is not one."""
    base = None if base_dir is None else WeightFiles.inside(Path(base_dir))
    if isinstance(model, ModelProto):
        return Source(model, base or WeightFiles(None), label=model.graph.name or "ModelProto")
    if isinstance(model, bytes | bytearray | memoryview):
        view = memoryview(model)
        data = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        return _from_bytes(data, limits, base or WeightFiles(None), f"{len(data)} bytes")
    if isinstance(model, str | os.PathLike):
        return _from_path(Path(model), limits, base)
    if hasattr(model, "read"):
        # one byte more than allowed is enough to know that there is too much
        content = model.read() if limits.model_bytes is None else model.read(limits.model_bytes + 1)
        if not isinstance(content, bytes):
            raise InvalidModel("the model file is open in text mode; open it with 'rb'")
        name = getattr(model, "name", None)
        found = base or WeightFiles(Path(name) if isinstance(name, str) and os.path.exists(name) else None)
        return _from_bytes(memoryview(content), limits, found, repr(name) if name else "file object")
    raise InvalidModel(f"a model is a path, bytes, a file object or a ModelProto, not {type(model).__name__}")


def _from_path(path: Path, limits: Limits, base: WeightFiles | None) -> Source:
    label = repr(str(path))
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise InvalidModel(f"cannot open model {label}: {getattr(error, 'strerror', None) or error}") from error
    if path.is_dir():
        raise InvalidModel(f"model {label} is a folder; give the .onnx file in it")
    _check_size(size, limits, label)
    if size == 0:
        raise InvalidModel(f"model {label} is empty")
    files = base or WeightFiles(path)
    if path.suffix in _TEXT_FORMATS:
        _check_nesting(path, limits, label)
        try:
            return Source(onnx.load(str(path), load_external_data=False), files, label=label, nbytes=size)
        except Exception as error:
            raise InvalidModel(f"model {label} cannot be parsed: {error}") from error
    try:
        data = mapped(path)
        opened = Opened(path, len(data))
    except (OSError, ValueError) as error:
        raise InvalidModel(f"cannot open model {label}: {error}") from error
    return _from_bytes(data, limits, files, label, opened)


def _from_bytes(
    data: memoryview, limits: Limits, files: WeightFiles, label: str, opened: Opened | None = None
) -> Source:
    _check_size(len(data), limits, label)
    if len(data) == 0:
        raise InvalidModel(f"model {label} is empty")
    proto = ModelProto()
    try:
        found = skeleton(data)
        message, where = found.message, found.weights
    except Malformed:  # the real parser says what is wrong
        message, where = bytes(data), {}
    try:
        proto.ParseFromString(message)
    except (DecodeError, ValueError, RecursionError) as error:
        raise InvalidModel(f"model {label} is not an ONNX model (protobuf does not parse: {error})") from error
    cut = {k: Piece(data[offset : offset + length], opened) for k, (offset, length) in where.items()}
    return Source(proto, files, cut, label, len(data))


def _check_nesting(path: Path, limits: Limits, label: str) -> None:
    """Parsers of text recurse at every bracket, one of them in native code without a limit of its own."""
    allowed = _BRACKETS * min(limits.graph_depth or _DEEPEST, _DEEPEST)
    depth = 0
    for token in _TOKEN.finditer(path.read_text(errors="replace")):
        bracket = token[0]
        depth += (bracket in ("(", "[", "{", "<")) - (bracket in (")", "]", "}", ">"))
        if depth > allowed:
            raise ResourceLimit("graph_depth", allowed, depth, f"brackets of model {label}")


def _check_size(size: int, limits: Limits, label: str) -> None:
    if limits.model_bytes is not None and size > limits.model_bytes:
        raise ResourceLimit("model_bytes", limits.model_bytes, size, f"model {label}")
