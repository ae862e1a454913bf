"""What modules with weights in few bits have in common: codes as constants, and a function of them that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput
from ranvier.graph.tensors import remade
from ranvier.memory.trim import gone
from ranvier.quantize.base import Quantized
from ranvier.tensor.core import Tensor
from ranvier.tensor.expr import Spec
from ranvier.tensor.jitted import jit
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import Constant

Array = np.ndarray[Any, Any]
Reader = Callable[[], Quantized]

_COMPILED = "_jitted"
_LEAST = 1 << 16  # bytes that are worth reading again; those who rewrite graphs look at what smaller ones hold


class Coded(Module):
    """The operator that reads the codes is compiled also outside of ``jit``: it has them in the order that the
    processor wants, and nothing makes numbers of all of them."""

    _op: Spec
    _computed: Callable[..., Tensor]

    @property
    def nbytes(self) -> int:
        """Of codes, scales and zeros."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def _kind(self) -> str:
        return self._op[0].rpartition("::")[2]

    def _compiled(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] | None = self.__dict__.get(_COMPILED)
        if found is None:
            found = jit(self._computed)
            object.__setattr__(self, _COMPILED, found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Copies compile their own."""
        return {name: value for name, value in self.__dict__.items() if name != _COMPILED}


def held(arrays: Sequence[Array], make: Callable[[], Sequence[Array]] | None) -> list[Constant]:
    """Constants of a module; ``make`` gives the arrays again, so that those that take much memory need not stay."""
    if make is None:
        return [Constant(array) for array in arrays]
    constants = remade(_own(arrays), lambda: _own(make()), "a checkpoint")
    return [
        Constant(array) if array.nbytes <= _LEAST else Constant.of(constant)
        for array, constant in zip(arrays, constants, strict=True)
    ]


def _own(arrays: Iterable[Array]) -> list[Array]:
    """Arrays that stay what they are: forms are nearly always new ones, and seldom the bytes of a file as it has them,
    which are others when somebody writes to it."""
    found = []
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        found.append(array if base is None else array.copy())
    return found


def let_go(given: object) -> None:
    """Nobody needs these codes any more: a module has them in another form."""
    each = (given,) if isinstance(given, Quantized) else given if isinstance(given, Sequence) else ()
    gone(sum(codes.codes.nbytes for codes in each))


def again(given: object) -> bool:
    """Whether codes can be read again, where that takes no more than looking at a file once more."""
    return callable(given) and bool(getattr(given, "lasting", True))


@contextmanager
def opened(given: Any) -> Iterator[Any]:
    """Codes, or what reads some rows of them at a time."""
    rows = getattr(given, "opened", None)
    if rows is not None:
        with rows() as found:
            yield found
    else:
        yield given() if callable(given) else given


def level_of(activations: str) -> int:
    """What operators call the kind that activations are rounded to at most."""
    from ranvier.runtime.quantizing.options import LEVELS  # only here: it takes time

    if activations not in LEVELS:
        raise InvalidInput(f"activations may be rounded to {', '.join(LEVELS)}, not {activations!r}")
    return LEVELS[activations]


_OF_TENSORS = True
