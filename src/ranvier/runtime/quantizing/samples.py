"""Samples of a model's inputs, and what its values are on them."""

from __future__ import annotations

import contextlib
import itertools
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import InvalidInput
from ranvier.graph.exposed import can_be_shown, exposed
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Value
from ranvier.graph.types import TensorType
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
_SYMBOLIC_BATCH, _RUNS = 8, 16  # samples of one run at most, and runs that come first where the model leaves it open
_AT_ONCE, _MOST = 1 << 29, 96  # bytes and number of values looked at in one run: a deep net's need not all be held
_UNKNOWN = 1 << 24  # bytes of a value whose shape comes with the run
_NEVER = np.zeros((0,), np.float32)  # for a value that was computed less often than in the other model


def feeds_of(graph: Graph, data: Mapping[str, Array], most: int | None = None) -> list[Feed]:
    """Arrays of many samples, along their first axis, as inputs for runs of the model's own batch size."""
    wanted = [value for value in graph.inputs if value.name not in graph.defaults or value.name in data]
    absent = [value.name for value in wanted if value.name not in data]
    if absent:
        raise InvalidInput(f"the samples lack the inputs {', '.join(map(repr, absent))}; they have {sorted(data)}")
    sizes = []
    counted: dict[object, tuple[str, int]] = {}  # by the first axis of inputs, where its size is open
    given: dict[str, int] = {}  # runs, where it is known
    for value in wanted:
        array = np.asarray(data[value.name])
        _check_numbers(value.name, array)
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        rank = len(shape) if shape is not None else array.ndim
        if array.ndim != rank or not rank:
            sizes.append((1, 1))  # one sample that serves all runs
            continue
        own = shape[0] if shape is not None else None
        if isinstance(own, int) and own > 0:
            sizes.append((len(array), own))
            if len(array) != own:
                given[value.name] = len(array) // own
            continue
        other, count = counted.setdefault(own, (value.name, len(array)))
        if own is not None and count != len(array):
            raise InvalidInput(f"input {value.name!r} has {len(array)} samples, and {other!r} has {count}")
        sizes.append((len(array), max(1, min(_SYMBOLIC_BATCH, len(array) // _RUNS))))
    if len(set(given.values())) > 1:
        told = ", ".join(f"{name!r} for {count}" for name, count in given.items())
        raise InvalidInput(f"inputs have samples for different numbers of runs: {told}")
    runs = min((count // batch for count, batch in sizes if count != batch), default=1)
    if runs < 1:
        raise InvalidInput("there are fewer samples than the model takes at once")
    found: list[Feed] = []
    for k in range(runs if most is None else min(runs, most)):
        feed = {}
        for value, (count, batch) in zip(wanted, sizes):
            array = np.asarray(data[value.name])
            feed[value.name] = array if count == batch else array[k * batch : (k + 1) * batch]
        found.append(feed)
    return found


def _check_numbers(name: str, array: Array) -> None:
    """Infinities may be meant (a mask has them); of what is no number nothing can be learned."""
    if array.shape[:1] == (0,):
        raise InvalidInput(f"input {name!r}: there are no samples, its shape is {list(array.shape)}")
    if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
        place = np.argwhere(np.isnan(array))[0] if array.ndim else [0]
        raise InvalidInput(f"input {name!r}: sample {int(place[0])} holds NaN")


def read_samples(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except zipfile.BadZipFile as error:
        hint = ": an .npy file has one array without a name" if path.suffix == ".npy" else f": {error}"
        raise InvalidInput(f"{str(path)!r} is no .npz file of inputs, as numpy.savez writes it{hint}") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read as an .npz file of inputs: {error}") from None


def visit(
    graph: Graph, names: Sequence[str], feeds: Iterable[Feed], config: SessionConfig, look: Callable[[str, Array], None]
) -> None:
    """Run the samples and show each named value of each run, those of bodies each time that they were computed. What
    no run can show is passed over."""
    inputs, inside = {value.name for value in graph.inputs}, _inside(graph)
    feeds = list(feeds)
    for feed in feeds:
        for name in names:
            if name in inputs:
                look(name, np.asarray(feed[name]))
    computed = [name for name in dict.fromkeys(names) if name not in inputs and _is_shown(inside.get(name))]
    for some in _together(graph, computed):
        with Session(exposed(graph, some), config) as session:
            for feed in feeds:
                for name, result in session.run(feed, some).items():
                    for array in result if name in inside else (result,):
                        look(name, np.asarray(array))


def _inside(graph: Graph) -> dict[str, Value]:
    """Values of bodies, by name."""
    bodies = (body for body in graph.all_graphs() if body is not graph)
    return {value.name: value for body in bodies for value in body.values()}


def _is_shown(inside: Value | None) -> bool:
    """Whether a value can be looked at: all but some of those in bodies can."""
    return inside is None or can_be_shown(inside)


def visit_both(
    graphs: tuple[Graph, Graph],
    names: Sequence[str],
    feeds: Sequence[Feed],
    configs: tuple[SessionConfig, SessionConfig],
    look: Callable[[str, Array, Array], None],
) -> None:
    """Run the samples by two forms of a model and show each named value, which both compute, as either has it. Of one
    run at a time: those of all samples need not be held."""
    inside = _inside(graphs[0])
    for some in _together(graphs[0], [name for name in names if _is_shown(inside.get(name))]):
        with contextlib.ExitStack() as stack:
            both = [stack.enter_context(Session(exposed(g, some), c)) for g, c in zip(graphs, configs)]
            for feed in feeds:
                first, second = (session.run(feed, some) for session in both)
                for name in some:
                    both_of_it = first[name], second[name]
                    pairs = itertools.zip_longest(*both_of_it, fillvalue=_NEVER) if name in inside else (both_of_it,)
                    for was, now in pairs:
                        look(name, np.asarray(was), np.asarray(now))


def _together(graph: Graph, names: Sequence[str]) -> list[list[str]]:
    """Names in batches that are looked at in one run: each of them is compiled, and every sample runs."""
    types = {value.name: value.type for value in graph.values()}  # who knows how often bodies run
    batches: list[list[str]] = []
    held = 0
    for name in names:
        found = types.get(name)
        shape = found.shape if isinstance(found, TensorType) else None
        known = [size for size in shape if isinstance(size, int)] if shape is not None else []
        size = 4 * math.prod(known) if shape is not None and len(known) == len(shape) else _UNKNOWN
        if not batches or held + size > _AT_ONCE or len(batches[-1]) == _MOST:
            batches.append([])
            held = 0
        batches[-1].append(name)
        held += size
    return batches


def results(graph: Graph, feeds: Iterable[Feed], config: SessionConfig) -> Iterator[list[Array]]:
    """The outputs of the graph on each sample."""
    with Session(copied(graph), config) as session:
        for feed in feeds:
            yield [as_array(x) for x in session.run(feed).values()]


def as_array(result: Any) -> Array:
    """A result as one array: of a sequence all that is in it, end to end where shapes differ."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if not isinstance(result, list | tuple):
        return np.asarray(result)
    parts = [as_array(each) for each in result]
    if len({part.shape for part in parts}) > 1:
        return np.concatenate([part.reshape(-1) for part in parts])
    return np.asarray(parts)
