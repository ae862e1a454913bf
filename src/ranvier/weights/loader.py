"""Weights from anywhere: what there is, and the data on demand.

    loader = WeightLoader()
    loader.metadata("hf://owner/name/model.safetensors")      # by ranges; no tensor is read
    loader.load("model.safetensors", "layer.0.weight")        # mapped, not copied
    loader.load("s3://bucket/model.safetensors", "w", part=slice(0, 128))   # those rows only
    loader.load_many("model.safetensors.index.json")          # all of them, several at a time

What looks at a source or reads it, but for ``open``, has a twin whose name begins with ``a`` and that is awaited.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ranvier.errors import CannotWrite, InvalidConfig, OutOfMemory, WeightError, nearest
from ranvier.logs import warn_once
from ranvier.plugged import plugged
from ranvier.records import dataclass
from ranvier.rules import Flag, Positive, Whole
from ranvier.weights.access import Access
from ranvier.weights.blob import Ahead, Blob
from ranvier.weights.cache import WeightCache
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.index import SUFFIX, index_of
from ranvier.weights.formats.registry import format_names, open_checkpoint
from ranvier.weights.given import TEXT_OR_NONE, Place
from ranvier.weights.progress import Progress, Silent
from ranvier.weights.sources.base import Context, Source, pinned
from ranvier.weights.sources.local import FileSource
from ranvier.weights.sources.registry import ENTRY_POINTS, SCHEMES, source_of
from ranvier.weights.stored import Array, TensorInfo, Weight
from ranvier.weights.together import Stop, together
from ranvier.weights.transforms import Slice, Transform, apply

R = TypeVar("R")
_OWN = ("cache", "cache_limit", "verify", "concurrency", "tensor_bytes")  # options that are not of the network
_CACHE = Place("a path, a WeightCache", (str, os.PathLike, WeightCache), optional=True)


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint holds, told without reading its tensors."""

    source: str
    tensors: Mapping[str, TensorInfo]
    notes: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(info.size for info in self.tensors.values())


class WeightLoader:
    """Opens checkpoints wherever they are. One loader may be used by any number of threads."""

    def __init__(
        self,
        *,
        cache: str | os.PathLike[str] | WeightCache | None = None,
        cache_limit: int | None = None,
        offline: bool = False,
        verify: bool = False,
        concurrency: int = 4,
        progress: Progress | None = None,
        tensor_bytes: int | None = 1 << 36,
        **access: Any,
    ) -> None:
        owner = type(self).__name__
        names = [*_OWN, *(each.name for each in fields(Access))]
        for name in access:
            if name not in names:
                raise InvalidConfig(f"{owner}: unknown option {name!r}{nearest(name, names)}")
        _CACHE(owner, "cache", cache)
        if isinstance(cache, WeightCache) and cache_limit is not None:
            raise InvalidConfig(
                f"{owner}: cache_limit does nothing where cache is a WeightCache, which has its own limit"
            )
        Whole(0, optional=True)(owner, "cache_limit", cache_limit)
        folder = cache if isinstance(cache, WeightCache) else WeightCache(cache, cache_limit)
        options = Access(offline=offline, progress=Silent() if progress is None else progress, **access)
        self._context = Context(folder, options, Flag()(owner, "verify", verify))
        self._concurrency: int = Whole(1)(owner, "concurrency", concurrency)
        self._tensor_bytes: int | None = Positive()(owner, "tensor_bytes", tensor_bytes)

    def _until(self, stop: Stop) -> WeightLoader:
        """The same loader, whose transfers end when this is set."""
        found = copy.copy(self)
        found._context = replace(self._context, access=replace(self._context.access, stop=stop))
        return found

    # -- what there is --------------------------------------------------------------------------------------------

    def open(self, source: Any, *, format: str | None = None, **options: Any) -> Checkpoint:
        """The tensors of a source by name, none of them read yet. ``options`` are those of the format."""
        TEXT_OR_NONE(type(self).__name__, "format", format)
        found = pinned(source_of(source), self._context)

        def opened(source: Source) -> Blob:
            blob = source.open(self._context)
            return blob if blob.near else Ahead(blob)

        opening = Opening(lambda name: opened(found.sibling(name)), self._tensor_bytes, options=options)
        return open_checkpoint(opened(found), opening, format or found.format)

    def metadata(self, source: Any, *, format: str | None = None, **options: Any) -> Metadata:
        checkpoint = self.open(source, format=format, **options)
        infos = {name: weight.info for name, weight in checkpoint.items()}
        return Metadata(source_of(source).address, infos, checkpoint.notes)

    def available(self, source: Any) -> bool:
        """Whether the source is there; a source that cannot be asked raises."""
        return source_of(source).exists(self._context)

    def capabilities(self) -> dict[str, Any]:
        """Which sources and formats there are, and what the loader does with them."""
        return {
            "sources": sorted({"memory", *SCHEMES, *plugged(ENTRY_POINTS)}),
            "formats": format_names(),
            "transforms": ["cast", "quantize", "reshape", "scale", "slice", "transpose"],
            "partial": True,
            "concurrency": self._concurrency,
            "offline": self._context.access.offline,
            "cache": str(self._context.cache.folder),
        }

    # -- data -----------------------------------------------------------------------------------------------------

    def load(
        self,
        source: Any,
        tensor: str | None = None,
        *steps: Transform,
        part: Any = None,
        raw: bool = False,
        format: str | None = None,
        **options: Any,
    ) -> Array:
        """One tensor, behind these transformations; ``part`` is what one writes in brackets.

        A tensor on this machine is mapped: nothing is copied until somebody looks at it, and it is read-only.
        ``raw`` gives the bytes of encoded blocks instead of numbers.
        """
        checkpoint = self.open(source, format=format, **options)
        weight = checkpoint[_named(source_of(source), checkpoint, tensor)]
        weight = getattr(weight, "raw", weight) if raw else weight
        return _numbers(_through(weight, steps, part))

    def load_many(
        self,
        source: Any,
        names: Iterable[str] | None = None,
        *steps: Transform,
        format: str | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Several tensors, all where none is named, some at a time."""
        stop = Stop(self._context.access.stop)
        own = self._until(stop)
        if names is None:
            try:
                own.preload(source)  # all of it is wanted: one file instead of many ranges
            except CannotWrite as error:
                warn_once(f"weights {self._context.cache.folder}", f"{error}; tensors are read without the cache")
        checkpoint = own.open(source, format=format, **options)
        wanted = list(checkpoint) if names is None else _texts(names)
        checkpoint.look_at(wanted)
        weights = [_through(checkpoint[name], steps, None) for name in wanted]
        progress, label = self._context.access.progress, f"reading {source_of(source).address}"
        progress.begin(label, sum(weight.info.nbytes for weight in weights))

        def read(weight: Weight) -> Array:
            own._context.access.go_on(label)
            array = _numbers(weight)
            progress.advance(label, weight.info.nbytes)
            return array

        try:
            return dict(zip(wanted, together(read, weights, self._concurrency, stop)))
        finally:
            progress.end(label)

    def preload(self, *sources: Any) -> list[Path | None]:
        """Bring files into the cache, some at a time, with all shards of those that are in several files.

        Where one fails the others are stopped; they go on where they were when they are asked for again.
        """
        stop = Stop(self._context.access.stop)
        context = self._until(stop)._context

        def fetch(source: Source) -> Path | None:
            return source.fetch(context)

        found = [source_of(each) for each in sources]
        paths = together(fetch, found, self._concurrency, stop)
        shards = [shard for source in found for shard in _shards(source, context)]
        together(fetch, shards, self._concurrency, stop)
        return paths

    # -- the same, awaited ----------------------------------------------------------------------------------------

    async def ametadata(self, source: Any, **options: Any) -> Metadata:
        return await self._awaited(lambda own: own.metadata(source, **options))

    async def aavailable(self, source: Any) -> bool:
        return await self._awaited(lambda own: own.available(source))

    async def aload(self, source: Any, tensor: str | None = None, *steps: Transform, **options: Any) -> Array:
        return await self._awaited(lambda own: own.load(source, tensor, *steps, **options))

    async def aload_many(
        self, source: Any, names: Iterable[str] | None = None, *steps: Transform, **options: Any
    ) -> dict[str, Array]:
        return await self._awaited(lambda own: own.load_many(source, names, *steps, **options))

    async def apreload(self, *sources: Any) -> list[Path | None]:
        return await self._awaited(lambda own: own.preload(*sources))

    async def _awaited(self, work: Callable[[WeightLoader], R]) -> R:
        """What a loader gives in a thread; when the task is cancelled, or its loop is closed before it ends, its
        transfers do."""
        stop = Stop(self._context.access.stop, asyncio.get_running_loop().is_closed)
        try:
            return await asyncio.to_thread(work, self._until(stop))
        finally:
            stop.set()


def _named(source: Source, checkpoint: Checkpoint, tensor: str | None) -> str:
    name = tensor if tensor is not None else getattr(source, "tensor", None)
    if name is not None:
        return str(name)
    if len(checkpoint) == 1:
        return next(iter(checkpoint))
    some = ", ".join(repr(n) for n in list(checkpoint)[:5])
    raise WeightError(f"{source.address} holds {len(checkpoint)} tensors, say which one: {some} …")


def _numbers(weight: Weight) -> Array:
    try:
        return weight.read()
    except MemoryError as error:
        if isinstance(error, OutOfMemory):
            raise
        name, nbytes = weight.info.name, weight.info.nbytes
        text = f"no memory for tensor {name!r} of {nbytes:,} bytes, or for what it is made of"
        raise OutOfMemory(text, part="weights", requested=nbytes) from error


def _texts(names: Any) -> list[str]:
    several = isinstance(names, Iterable) and not isinstance(names, str)
    found: list[str] = list(names) if several else [names]
    for name in found:
        if not isinstance(name, str):
            raise WeightError(f"tensors are named by texts, not by {name!r}")
    return found


def _through(weight: Weight, steps: Sequence[Transform], part: Any) -> Weight:
    return apply(weight, *steps, *([Slice(part)] if part is not None else []))


def _shards(source: Source, context: Context) -> list[Source]:
    """The other files of a checkpoint that is fetched by its index, by one of its parts, or by a model whose data lies
    beside it; files of this machine are there already."""
    address = source.address
    of_parts = ".gguf" in address and "-of-" in address
    if isinstance(source, FileSource) or not (SUFFIX in address or of_parts or ".onnx" in address):
        return []
    source = pinned(source, context)
    blob, limit = source.open(context), Opening().header_bytes
    files: Iterable[str] = ()
    if blob.name.endswith(SUFFIX):
        files = index_of(blob, limit)[0].values()
    elif of_parts:
        from ranvier.weights.formats.gguf_files import parts_of  # formats are imported when they are needed

        files = parts_of(blob, limit)
    elif blob.name.endswith(".onnx"):
        from ranvier.weights.formats.onnx_files import external_files

        files = external_files(blob)
    return [source.sibling(file) for file in dict.fromkeys(files) if file != blob.name]
