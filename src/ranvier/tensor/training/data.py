"""Batches in an order that follows from a seed, the number of the epoch and nothing else.

So training that was interrupted goes on in the middle of an epoch with the batch it would have had: what has to be
remembered is a seed and two numbers, not a shuffled list nor the state of a generator. The same holds for transforms:
each batch brings a generator of its own, made of the seed, the epoch and the number of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ranvier.errors import InvalidInput
from ranvier.tensor import random
from ranvier.tensor.core import Tensor
from ranvier.tensor.trees import filled, leaves, mapped

Array = np.ndarray[Any, Any]
Transform = Callable[[Any, np.random.Generator], Any]
_TRANSFORMED = 1 << 62  # folded into keys of transforms, so that they are not those of the shuffling


@runtime_checkable
class Data(Protocol):
    """What a loop trains on: any epoch, from any of its batches on."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from number ``start`` on; equal calls give equal batches."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What decides the batches and their order, as plain data; a run that is resumed compares it."""
        ...


class Batches:
    """Batches of arrays in memory, or of anything with a length that can be indexed.

    ``source`` is nested dicts, lists or tuples of arrays with one first axis; or an object with ``__len__`` and
    ``__getitem__`` whose samples are stacked. ``transform(batch, generator)`` changes a batch on its way out; what it
    draws from the generator is the same whenever that batch comes again.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        transform: Transform | None = None,
    ) -> None:
        if batch_size < 1:
            raise InvalidInput(f"a batch has at least one sample, not {batch_size}")
        self._arrays = _arrays(source) if isinstance(source, dict | list | tuple | np.ndarray | Tensor) else None
        self._source = source
        self.size = _size(self._arrays) if self._arrays is not None else len(source)
        if self.size == 0 or (drop_last and self.size < batch_size):
            raise InvalidInput(f"{self.size} samples make no batch of {batch_size}")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._transform = transform

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def order(self, epoch: int) -> Array:
        """The numbers of the samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.size)
        return random.permutation(random.fold_in(random.key(self.seed), epoch), self.size).numpy()

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        order = self.order(number)
        for k in range(start, len(self)):
            batch = self._taken(order[k * self.batch_size : (k + 1) * self.batch_size])
            yield batch if self._transform is None else self._transform(batch, generator(self.seed, number, k))

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(0)

    def facts(self) -> Mapping[str, Any]:
        return {
            "samples": self.size,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _taken(self, places: Array) -> Any:
        if self._arrays is not None:
            return mapped(lambda array: array[places], self._arrays)
        samples = [self._source[int(k)] for k in places]
        columns = zip(*(list(leaves(sample)) for sample in samples))
        return filled(samples[0], [np.stack([np.asarray(x) for x in column]) for column in columns])


class Stream:
    """Batches from something that can only be gone through: a file, a queue, a generator.

    ``make(epoch)`` begins anew. A resumed run goes through what came before without looking at it; where ``make`` takes
    a second argument by the name ``start``, it is left to find the place itself.
    """

    def __init__(self, make: Callable[..., Iterable[Any]], *, name: str = "", seeks: bool = False) -> None:
        self._make = make
        self._name = name or getattr(make, "__qualname__", type(make).__name__)
        self._seeks = seeks

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        if self._seeks:
            return iter(self._make(number, start=start))
        return islice(self._make(number), start, None)

    def facts(self) -> Mapping[str, Any]:
        return {"stream": self._name}


def as_data(given: Any, batch_size: int | None = None, seed: int = 0) -> Data:
    """What a user calls data: it itself, arrays that make batches, or a sequence of batches."""
    if isinstance(given, Data):
        return given
    if callable(given):
        return Stream(given)
    if isinstance(given, tuple | dict | np.ndarray | Tensor) and batch_size is not None:
        return Batches(given, batch_size, seed=seed)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | tuple):
        return Stream(lambda epoch: given, name=f"{len(given)} batches")
    raise InvalidInput(
        "data is Batches(arrays, batch_size), Stream(function), a list of batches, or arrays with a batch_size; "
        f"not {type(given).__name__}"
    )


def generator(seed: int, epoch: int, batch: int) -> np.random.Generator:
    """Random numbers for one batch."""
    key = random.fold_in(random.fold_in(random.fold_in(random.key(seed), _TRANSFORMED), epoch), batch)
    first, second = key.tolist()
    return np.random.Generator(np.random.Philox(key=[first, second]))


def _arrays(source: Any) -> Any:
    return mapped(lambda each: each.numpy() if isinstance(each, Tensor) else np.asarray(each), source)


def _size(arrays: Any) -> int:
    sizes = {len(array) if array.ndim else -1 for array in leaves(arrays)}
    if len(sizes) != 1 or -1 in sizes:
        raise InvalidInput(f"arrays of samples have one length, not {sorted(sizes)}")
    return int(sizes.pop())
