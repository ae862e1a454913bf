"""What a format of checkpoints is: how it is told from others, and how one is opened."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import field
from typing import Any, Protocol

from ranvier.errors import WeightError, nearest
from ranvier.records import dataclass
from ranvier.weights.blob import Blob
from ranvier.weights.stored import Weight

Sibling = Callable[[str], Blob]  # another file of the same source, by its name


class Checkpoint(Mapping[str, Weight]):
    """Tensors by name, none of them read yet, and what the file says about itself. ``look``, where it is given, is
    called with names that are about to be asked for, all of them before a walk over all: looking where each of them is
    may take requests that are better made together."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        notes: Mapping[str, Any] | None = None,
        label: str = "",
        look: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        self._weights = weights
        self.notes: Mapping[str, Any] = notes or {}
        self.label = label
        self._look = look

    @property
    def at_hand(self) -> bool:
        """Whether a look at a tensor costs nothing: those of an index are in files that are opened for it."""
        return self._look is None

    def look_at(self, names: Iterable[str]) -> None:
        """These are about to be asked for."""
        if self._look is not None:
            self._look(names)

    def items(self) -> ItemsView[str, Weight]:
        self.look_at(self)
        return super().items()

    def values(self) -> ValuesView[Weight]:
        self.look_at(self)
        return super().values()

    def __getitem__(self, name: str) -> Weight:
        try:
            return self._weights[name]
        except KeyError:
            others = nearest(str(name), self)
            raise WeightError(f"{self.label or 'the checkpoint'} has no tensor {name!r}{others}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self._weights.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@dataclass(frozen=True)
class Opening:
    """What a reader may need beside the bytes."""

    sibling: Sibling | None = None  # files beside this one, for sharded checkpoints and external data
    tensor_bytes: int | None = 1 << 36  # no tensor is larger
    header_bytes: int = 100 << 20  # nor any header
    options: Mapping[str, Any] = field(default_factory=dict)  # of the format: the shape of raw data, for example

    def beside(self, name: str, of: str) -> Blob:
        if self.sibling is None:
            raise WeightError(f"{of!r} refers to {name!r}, and its source has no other files")
        return self.sibling(name)


class Format(Protocol):
    """One kind of file. New ones come by the entry points ``ranvier.weight_formats``: a class or object like this.

    One that names its options, in a tuple ``options``, is never given others.
    """

    name: str
    suffixes: tuple[str, ...]

    def matches(self, head: bytes, name: str) -> bool:
        """Whether a file with this name that begins with these bytes (512 at most) is of this kind."""
        ...

    def open(self, blob: Blob, opening: Opening) -> Checkpoint: ...
