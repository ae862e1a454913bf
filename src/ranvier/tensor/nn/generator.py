"""Random numbers for layers: a key and a count of draws, held as a state.

``ranvier.numpy.random`` takes a key for each draw and makes its words on the host; a layer inside a compiled step needs
new ones at every call of the same program. So the same generator is here in operators of the
graph (``philox``): the state goes in, the words are computed with everything else, and the state goes out, its count
raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import DeviceMismatch, InvalidInput
from ranvier.tensor import philox, random
from ranvier.tensor.autodiff import stop_gradient
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import greater_equal
from ranvier.tensor.manipulate import concat, reshape
from ranvier.tensor.shapes import count
from ranvier.tensor.state import State
from ranvier.tensor.tracing import now

_LAYERS = 3  # what these counters are used for; ``random`` has smaller ones


class Generator:
    """A stream of random numbers: ``Generator(seed)``. Equal seeds give equal streams on every machine.

    ``state`` is [first word of the key, second word, draws so far]; save and restore it to go on where one was.
    """

    def __init__(self, seed: int = 0) -> None:
        self.state = State(_start(seed))

    def manual_seed(self, seed: int) -> Generator:
        """Begin the stream of a seed."""
        self.state.assign(Tensor(_start(seed)))
        return self

    def to_device(self, device: Any) -> Generator:
        """Let numbers be drawn on a device: there where they are used."""
        self.state.assign(self.state.value.to_device(device))
        return self

    def key(self) -> Tensor:
        """A key for ``ranvier.numpy.random``, another at each call. For layers as they are made, not for steps."""
        first, second, draws = (int(n) for n in self.state.numpy())
        self._advance()
        return random.fold_in(random.key(first << 32 | second), draws)

    def words(self, shape: Sequence[int]) -> Tensor:
        """Numbers of 32 random bits, as 64-bit integers; computed on need, also inside ``jit``."""
        return _joined(self._drawn(shape), shape)

    def kept(self, p: float, shape: Sequence[int], device: Any = None) -> Tensor:
        """True for each element with a probability of ``1 - p``; on a device, if one is given."""
        if not 0.0 <= p <= 1.0:
            raise InvalidInput(f"not a probability: {p}")
        if device is not None and self.state.device != device:
            if now.tracing is not None:
                raise DeviceMismatch(f"numbers are drawn on {self.state.device} for use on {device}; see to_device")
            self.to_device(device)
        drawn = self._drawn(shape)
        bound = philox.constant(min(int(p * 2.0**32), 2**32), drawn[0])
        return _joined([greater_equal(words, bound) for words in drawn], shape)

    def _drawn(self, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Words enough for a shape, in four parts, and the state one draw further."""
        found = _philox(stop_gradient(Tensor(self.state)), (count(tuple(shape)) + 3) // 4)
        self._advance()
        return found

    def _advance(self) -> None:
        self.state.assign(self.state + philox.constant((0, 0, 1), self.state))


def _start(seed: int) -> Any:
    number = int(seed) & 0xFFFFFFFFFFFFFFFF
    return np.array([number >> 32, number & 0xFFFFFFFF, 0], np.uint64)


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """As many elements of the parts, one part after the other, as a shape has."""
    return reshape(concat(parts, axis=0)[: count(tuple(shape))], tuple(shape))


def _philox(state: Tensor, blocks: int) -> philox.Words:
    """Four words for each block: the first ones of all blocks, the second ones and so on."""
    whole, low = philox.constant(np.arange(blocks), state), philox.constant(0xFFFFFFFF, state)
    upper = philox.shifted(philox.RIGHT, whole, 32)
    counter = whole & low, upper, philox.constant((_LAYERS,), state), state[2:3] & low
    return philox.words(counter, (state[0:1], state[1:2]))


default_generator = Generator(0)


def manual_seed(seed: int) -> Generator:
    """Begin the stream that layers draw from which were given none of their own."""
    return default_generator.manual_seed(seed)


_OF_TENSORS = True
