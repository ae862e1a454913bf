"""Which formats there are, and which one a file is of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module

from ranvier.errors import InvalidConfig, WeightError, nearest
from ranvier.logs import warn_once
from ranvier.plugged import plugged
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Format, Opening

ENTRY_POINTS = "ranvier.weight_formats"
_HEAD = 512
# imported when first needed; asked in this order, the surer ones first
_OWN: dict[str, tuple[str, str]] = {
    "index": ("index", "Index"),
    "npy": ("numpy_files", "Npy"),
    "gguf": ("gguf_files", "Gguf"),
    "npz": ("numpy_files", "Npz"),
    "pytorch": ("pytorch", "PyTorch"),
    "onnx": ("onnx_files", "Onnx"),
    "raw": ("raw", "Raw"),
    "safetensors": ("safetensors", "SafeTensors"),
}
_added: dict[str, Format] = {}
_lock = threading.Lock()


def register_format(found: Format) -> None:
    """Add a format; one of the same name is replaced."""
    with _lock:
        _added[found.name] = found


def format_names() -> list[str]:
    return sorted({*_OWN, *_added, *plugged(ENTRY_POINTS)})


def format_of(name: str) -> Format:
    if name in _added:
        return _added[name]
    if name in _OWN:
        module, attribute = _OWN[name]
        found: Callable[[], Format] = getattr(import_module(f"ranvier.weights.formats.{module}"), attribute)
        return found()
    others = plugged(ENTRY_POINTS)
    if name in others:
        try:
            made = others[name].load()
            brought: Format = made() if isinstance(made, type) else made
        except Exception as error:  # whatever a package of others does when it is imported
            raise InvalidConfig(
                f"format of weights {name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        with _lock:
            _added[name] = brought
        return brought
    raise InvalidConfig(f"unknown format of weights {name!r}{nearest(name, format_names())}")


def open_checkpoint(blob: Blob, opening: Opening, name: str | None = None) -> Checkpoint:
    """The checkpoint in a blob, of the named format or of the one it looks like."""
    found = format_of(name) if name is not None else _looks_like(blob)
    known: tuple[str, ...] = getattr(found, "options", tuple(opening.options))
    unknown = sorted(set(opening.options) - set(known))
    if unknown:
        raise InvalidConfig(f"{blob.name!r}: {found.name} has no option {unknown[0]!r}{nearest(unknown[0], known)}")
    return found.open(blob, opening)


def _looks_like(blob: Blob) -> Format:
    head = bytes(blob.read(0, min(_HEAD, blob.size)))
    # these come under any name: a page to log in, what a clone has without the large files
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        raise WeightError(f"{blob.name!r} is a page of HTML or XML, not a file of weights: {head[:60]!r}")
    if head.startswith(b"version https://git-lfs"):
        raise WeightError(f"{blob.name!r} is a pointer of Git LFS in place of the file: 'git lfs pull' fetches that")
    for each in (*_added, *plugged(ENTRY_POINTS), *_OWN):
        try:
            found = format_of(each)
        except InvalidConfig as error:  # a package that is broken must not keep anybody from files of other formats
            warn_once(f"format of weights {each}", str(error))
            continue
        if found.matches(head, blob.name):
            return found
    raise WeightError(
        f"{blob.name!r} is in no known format (known: {', '.join(format_names())}); it begins {head[:16]!r}"
    )
