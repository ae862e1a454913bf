"""What modules with weights in few bits have in common: codes as constants, and a function of them that is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.expr import Spec
from ranvier.tensor.jitted import jit
from ranvier.tensor.nn.modules.base import Module

_COMPILED = "_jitted"


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


def level_of(activations: str) -> int:
    """What operators call the kind that activations are rounded to at most."""
    from ranvier.runtime.quantizing.options import LEVELS  # only here: it takes time

    if activations not in LEVELS:
        raise InvalidInput(f"activations may be rounded to {', '.join(LEVELS)}, not {activations!r}")
    return LEVELS[activations]


_OF_TENSORS = True
