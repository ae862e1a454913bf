"""``ranvier weights``: what a checkpoint holds, wherever it is; and files brought here for later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ranvier import dtypes
from ranvier.cli.options import with_output
from ranvier.cli.render import Output, bytes_text, facts, table
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidConfig, printable
from ranvier.weights import Bars, Metadata, WeightLoader, source_of

_MOST_ROWS = 60
_PIECE = 1 << 20  # elements
_LARGE = 1e150  # of numbers above it float64 has no room for the squares


@click.command()
@click.argument("source")
@click.option("--fetch", is_flag=True, help="Download it, with all its shards, into the cache.")
@click.option("--format", "kind", help="Read it as this format instead of finding out.")
@click.option("--dtype", help="Element type of raw data, or of .npy files that do not say it (bfloat16, float8 …).")
@click.option("--shape", help="Shape of raw data, such as 128x64.")
@click.option("--tensor", help="Show this tensor's numbers in short: shape, range, mean, spread.")
@click.option("--all", "everything", is_flag=True, help=f"List every tensor, not only the first {_MOST_ROWS}.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of the cache.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.option("--timeout", type=float, default=20.0, show_default=True, help="Seconds to wait for a byte.")
@with_output
def command(
    output: Output,
    source: str,
    fetch: bool,
    kind: str | None,
    dtype: str | None,
    shape: str | None,
    tensor: str | None,
    everything: bool,
    cache_dir: Path | None,
    offline: bool,
    timeout: float,
) -> None:
    """Show the tensors of SOURCE: a file, a URL, hf://owner/name/file[@revision] or s3://bucket/key.

    Formats: safetensors, PyTorch and GGUF (in several files too), NumPy, ONNX. Only headers are read, also over the
    network.
    """
    if fetch and offline:
        raise InvalidConfig("--fetch and --offline exclude each other")
    options: dict[str, Any] = {} if dtype is None else {"dtype": _element(dtype)}
    if shape is not None:
        options["shape"] = _shape(shape)
    with contextlib.ExitStack() as stack:
        bars = stack.enter_context(Bars()) if output.talks and (fetch or tensor) else None
        loader = WeightLoader(cache=cache_dir, offline=offline, progress=bars, timeout=timeout)
        data: dict[str, Any] = {}
        if fetch:
            data["path"] = str(loader.preload(source)[0])
        if tensor is not None:
            data["tensor"] = _summary(loader.load(source, tensor, format=kind, **options), tensor)
        found = loader.metadata(source, format=kind, **options)
    data = {"source": source_of(source).address, **_described(found), **data}
    if output.json:
        output.emit(data)
    else:
        _show(output, data, everything)


def _element(text: str) -> str:
    """The name of a type of numbers as it was given: the order of bytes is in it too."""
    try:
        if dtypes.of(text) is not DType.string:
            return text
    except DTypeMismatch:
        pass
    raise InvalidConfig(f"--dtype must be a type of numbers, such as float16, bfloat16 or >f4, got {text!r}")


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.replace("x", ",").split(",") if text else []
    if not all(size.isdecimal() and len(size) < 20 for size in sizes):
        raise InvalidConfig(f"--shape must be like 128x64, got {text!r}")
    return tuple(map(int, sizes))


def _described(found: Metadata) -> dict[str, Any]:
    tensors = [
        {"name": t.name, "dtype": str(t.dtype), "shape": list(t.shape), "bytes": t.nbytes, "encoding": t.encoding}
        for t in found.tensors.values()
    ]
    notes = {key: value for key, value in found.notes.items() if isinstance(value, str | int | float | bool)}
    return {"tensors": tensors, "bytes": found.nbytes, "parameters": found.parameters, "notes": notes}


def _summary(array: Any, name: str) -> dict[str, Any]:
    """Computed piece by piece: as float64 and all at once, a tensor would take several times its size in memory."""
    import numpy as np

    if array.dtype == object:  # text has no numbers
        return {"name": name, "shape": list(array.shape), "of": "strings"}
    of_complex = np.iscomplexobj(array)
    flat = array.reshape(-1)
    pieces = [slice(start, start + _PIECE) for start in range(0, flat.size, _PIECE)]

    def numbers(piece: slice) -> Any:
        return np.asarray(np.abs(flat[piece]) if of_complex else flat[piece]).astype(np.float64)

    count = zeros = 0
    total, least, most = 0.0, np.inf, -np.inf
    for piece in pieces:
        found = numbers(piece)
        zeros += int((found == 0).sum())
        finite = found[np.isfinite(found)]
        if finite.size:
            ends = flat[piece] if array.dtype.kind in "iu" else finite  # of 64 bits not all are float64
            least, most = min(least, ends.min().item()), max(most, ends.max().item())
            with np.errstate(over="ignore"):
                count, total = count + finite.size, total + float(finite.sum())
    described: dict[str, Any] = {"name": name, "shape": list(array.shape), "finite": count == flat.size}
    if of_complex:
        described["of"] = "magnitudes"
    if not count:
        return described

    def of_finite(compute: Callable[[Any], Any]) -> float:
        """The sum of what is computed of all finite numbers."""
        return sum(float(compute(found[np.isfinite(found)]).sum()) for found in map(numbers, pieces))

    unit = max(most, -least) if max(most, -least) > _LARGE else 1.0
    mean = (total if unit == 1.0 else of_finite(lambda found: found / unit)) / count
    spread = (of_finite(lambda found: np.square(found / unit - mean)) / count) ** 0.5
    return described | {"min": least, "max": most, "mean": mean * unit, "std": spread * unit, "zeros": zeros}


def _show(output: Output, data: dict[str, Any], everything: bool) -> None:
    lines = [
        ("source", data["source"]),
        ("tensors", f"{len(data['tensors']):,}"),
        ("parameters", f"{data['parameters']:,}"),
        ("size", bytes_text(data["bytes"])),
    ]
    if "path" in data:
        lines.append(("file", data["path"]))
    lines += [(key, str(value)[:100]) for key, value in list(data["notes"].items())[:12]]
    output.show(facts([(printable(key), printable(value)) for key, value in lines]))
    if tensor := data.get("tensor"):
        output.show("", facts([(key, printable(str(value))) for key, value in tensor.items()]))
        return
    shown = data["tensors"] if everything else data["tensors"][:_MOST_ROWS]
    rows = [
        (
            printable(t["name"]),
            t["encoding"] or t["dtype"],
            "x".join(map(str, t["shape"])) or "scalar",
            bytes_text(t["bytes"]),
        )
        for t in shown
    ]
    output.show("", table(["!tensor", "!type", "!shape", ">size"], rows))
    if len(shown) < len(data["tensors"]):
        output.show(f"… and {len(data['tensors']) - len(shown):,} more (--all lists them)")
