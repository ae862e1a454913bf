"""Steps of language models that decode, as the kernels want them.

A part with few tokens is bound by reading its weights, and each launch more is time in which nothing is read. So what
stands around a product goes into its launch: the norm before it, other products of the same tokens, the gate, the sum
behind it. Attention turns its token, writes it into the cache and reads it in one launch. Prompts get the library's
products and attention. Whatever fits no pattern stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.errors import RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.logs import logger
from ranvier.providers.cuda.bounds import ATTENTION
from ranvier.providers.cuda.constants import Constants
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.place import Gpu, Place
from ranvier.providers.cuda.steps import Env, Step
from ranvier.providers.cuda.table import CONTRIB
from ranvier.providers.cuda.variant import Specialise

_PDL_SINCE = (9, 0)  # compute capability
_TWIN_PROCESSORS = 8


class Decoding:
    """For one part: ``lay_out`` when its weights are loaded, then called like what makes kernels of runs of nodes,
    which it hands on to."""

    def __init__(self, place: Place, then: Specialise, nodes: Sequence[Node]) -> None:
        self._place = place
        self._then = then
        self._attends = any(node.op == ATTENTION and node.domain == CONTRIB for node in nodes)
        self._coded = any(node.op == "MatMulNBits" and node.domain == CONTRIB for node in nodes)
        self._shelf: Any = None
        self._constants: Constants | None = None

    def lay_out(self, constants: Constants) -> None:
        """Weights that nothing but products read: rows of the output together, seen as they were. ``constants`` are
        kept: codes are taken out of them when they are there in another form."""
        self._constants = constants
        if not self._attends:
            return
        for value in constants.values:
            const = value.const
            if const is not None and len(const.shape) == 2 and const.dtype.is_float and _only_multiplies(value):
                constants.tensors[value] = constants.form(value, "rows of the output", lambda x: x.mT.contiguous().mT)

    def __call__(self, steps: Sequence[Step], env: Env, outputs: Sequence[Value]) -> Sequence[Step]:
        if self._attends or self._coded:
            try:
                steps = self._rewritten(steps, env, outputs)
            except RanvierError as error:
                logger.info("a part is not decoded by kernels of its own: %s", error)
        return self._then(steps, env, outputs)

    def _rewritten(self, steps: Sequence[Step], env: Env, outputs: Sequence[Value]) -> Sequence[Step]:
        from ranvier.providers.cuda.decode_search import Search  # which needs triton
        from ranvier.providers.cuda.decode_weights import Shelf

        if self._shelf is None:
            self._shelf = Shelf(self._place)
        processors, pdl = _TWIN_PROCESSORS, False
        if isinstance(self._place, Gpu):
            facts = torch.cuda.get_device_properties(self._place.device)
            processors = facts.multi_processor_count
            pdl = (facts.major, facts.minor) >= _PDL_SINCE
        search = Search(steps, env, outputs, self._shelf, processors, pdl=pdl)
        found = search.run()
        for value in search.let_go():
            if self._constants is not None:
                self._constants.let_go(value)
        return found


def _only_multiplies(value: Value) -> bool:
    return bool(value.uses) and all(_multiplies(node, k) for node, k in value.uses) and not value.is_graph_output


def _multiplies(node: Node, position: int) -> bool:
    return node.op == "MatMul" and not node.domain and position == 1


__all__ = ["Decoding"]
