"""Run-time values as facts for people and programs, as files, and against each other."""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.cli.files import write_whole
from ranvier.graph.types import TensorType

Array = np.ndarray[Any, Any]
_SHOWN, _LISTED = 6, 1024  # elements shown to people, and at most listed in JSON
_TOP = 5


def type_text(value: Any) -> str:
    """``float32[1, 10]``, ``sequence of 3``, ``map of 4`` …"""
    if isinstance(value, np.ndarray):
        return str(TensorType(dtypes.of(value), value.shape))
    if isinstance(value, Mapping):
        return f"map of {len(value)}"
    return "nothing" if value is None else f"sequence of {len(value)}" if isinstance(value, list) else repr(value)


def describe(value: Any) -> dict[str, Any]:
    """Type, range and content; long tensors by their first elements."""
    facts: dict[str, Any] = {"type": type_text(value)}
    if isinstance(value, np.ndarray):
        facts["shape"] = list(value.shape)
        facts.update(_range(value))
        flat = value.reshape(-1)[:_LISTED]
        facts["values"] = [_scalar(x) for x in flat.tolist()]
        facts["truncated"] = value.size > _LISTED
        best = top_classes(value)
        if best:
            facts["top"] = [[{"class": k, "probability": p} for k, p in row] for row in best]
    elif isinstance(value, Mapping):
        facts["items"] = {
            str(k): _scalar(v) if not isinstance(v, np.ndarray) else describe(v) for k, v in value.items()
        }
    elif isinstance(value, list):
        facts["items"] = [describe(item) for item in value[:_LISTED]]
    return facts


def _scalar(x: Any) -> Any:
    """A Python number or string; element types Python does not have become numbers."""
    return x if isinstance(x, bool | int | float | str) else str(x) if isinstance(x, complex) else float(x)


def _range(array: Array) -> dict[str, float]:
    if array.size == 0 or array.dtype == object or array.dtype.kind == "c":
        return {}
    numbers = array.astype(np.float64)
    with np.errstate(all="ignore"):
        return {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}


def head_text(value: Any) -> str:
    """The first elements on one line."""
    if isinstance(value, np.ndarray):
        items = [_element(x) for x in value.reshape(-1)[:_SHOWN].tolist()]
        more = " …" if value.size > _SHOWN else ""
        return f"{' '.join(items)}{more}"
    if isinstance(value, Mapping):
        items = [f"{k}: {_element(v)}" for k, v in list(value.items())[:_SHOWN]]
        return ", ".join(items) + (" …" if len(value) > _SHOWN else "")
    if isinstance(value, list):
        return ", ".join(type_text(item) for item in value[:3]) + (" …" if len(value) > 3 else "")
    return str(value)


def _element(x: Any) -> str:
    if isinstance(x, str):
        return repr(x if len(x) <= 20 else x[:19] + "…")
    if isinstance(x, np.ndarray):
        return type_text(x) if x.size > 1 else _element(x.reshape(-1)[0].item())
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def number_text(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def top_classes(value: Array) -> list[list[tuple[int, float]]]:
    """The most probable classes of each row, where the last axis is a probability distribution; else nothing."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.ndim < 1 or value.shape[-1] < 3:
        return []
    rows = value.reshape(-1, value.shape[-1]).astype(np.float64)
    if not 1 <= len(rows) <= 3 or not np.isfinite(rows).all() or rows.min() < 0 or rows.max() > 1:
        return []
    if np.abs(rows.sum(axis=1) - 1).max() > 1e-3:
        return []
    best = np.argsort(-rows, axis=1, kind="stable")[:, :_TOP]
    return [[(int(k), float(row[k])) for k in order] for row, order in zip(rows, best)]


# -- files ----------------------------------------------------------------------------------------------------------


def save(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the values to an .npz, to an .npy (one tensor), or to a folder of .npy files; returns what was written."""
    arrays = dict(_flattened(values))
    suffix = path.suffix.lower()
    if suffix == ".npz":
        write_whole(path, lambda file: _write_npz(file, arrays))
        return [path]
    if suffix == ".npy" and len(arrays) == 1:
        (array,) = arrays.values()
        write_whole(path, _npy(array))
        return [path]
    written: list[Path] = []
    for name, array in arrays.items():
        target = path / f"{_file_name(name, {p.stem for p in written})}.npy"
        write_whole(target, _npy(array))
        written.append(target)
    return written


def _write_npz(file: Any, arrays: Mapping[str, Array]) -> None:
    """What ``np.savez`` writes; as a function of names it could not take an output that is called ``file``."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _npy(array: Array) -> Callable[[io.BufferedIOBase], None]:
    return lambda file: np.save(file, array, allow_pickle=False)


def _flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Tensors as they are; items of sequences as ``name.0``; maps as ``name.keys`` and ``name.values``."""
    for name, value in values.items():
        if isinstance(value, list):
            yield from _flattened({f"{name}.{k}": item for k, item in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from _flattened({f"{name}.keys": np.array(list(value)), f"{name}.values": _stack(value)})
        elif value is not None:
            array = np.asarray(value)
            yield name, array.astype(str) if array.dtype == object else array


def _stack(items: Mapping[Any, Any]) -> Array:
    return np.array([np.asarray(item) for item in items.values()])


def _file_name(name: str, taken: set[str]) -> str:
    stem = re.sub(r"[^\w.\-]+", "_", name).strip(".") or "output"
    found, k = stem, 1
    while found in taken:
        found, k = f"{stem}_{k}", k + 1
    return found


# -- comparison -----------------------------------------------------------------------------------------------------


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference relative to the largest magnitude; infinite where type, shape or structure differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return math.inf
        return _largest(difference(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return math.inf
        return _largest(difference(a, b) for a, b in zip(ours, theirs))
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return _tensor_difference(np.asarray(ours), np.asarray(theirs))


def _largest(found: Iterator[float]) -> float:
    return max(found, default=0.0)


def _tensor_difference(ours: Array, theirs: Array) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    if ours.dtype.kind in "OUS" or theirs.dtype.kind in "OUS":
        return 0.0 if np.array_equal(ours.astype(str), theirs.astype(str)) else math.inf
    if ours.dtype != theirs.dtype:
        return math.inf
    if ours.size == 0:
        return 0.0
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    with np.errstate(all="ignore"):
        gap = np.abs(a - b)[~same].max()
    if not np.isfinite(gap):
        return math.inf
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return float(gap / max(scale, 1e-12))


def cosine(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The least cosine of the angle between outputs taken as vectors; None where no two can be taken so."""
    found = []
    for name in names:
        a, b = (np.asarray(each.get(name)) for each in (ours, theirs))
        if a.shape == b.shape and a.dtype.kind in "fV" and b.dtype.kind in "fV" and a.size:
            x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
            size = np.linalg.norm(x) * np.linalg.norm(y)
            if np.isfinite(size) and size > 0:
                found.append(float(x @ y / size))
    return min(found, default=None)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The difference of each output."""
    return {name: difference(ours.get(name), theirs.get(name)) for name in names}
