"""An operator of the user's own with two bodies: one for tensors of a GPU, one for the host.

    @gpu_dispatch("my.domain::Scale")
    def scale(x, *, factor=2.0):
        return x * np.float32(factor)

    @scale.on_gpu
    def _(x, *, factor=2.0):
        return x * factor

The first body is declared as an operator like any other (:mod:`ranvier.ops.custom`): it takes NumPy arrays and is what
the second one is held against. Sessions with the provider ``cuda`` run the second one on its tensors. Called like a
function, the object takes the body that goes with what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DeviceMismatch, InvalidInput
from ranvier.graph.types import Type
from ranvier.ops.custom import InferRule, register_op, unregister_op
from ranvier.ops.registry import TypeCall
from ranvier.providers.cuda.table import ALL, Call, lowers, withdraw


class GpuDispatch:
    """The operator, once it is declared."""

    def __init__(self, domain: str, name: str, body: Callable[..., Any], types: frozenset[DType]) -> None:
        self.domain = domain
        self.name = name
        self._body = body
        self._types = types
        self._on_gpu: Callable[..., Any] | None = None

    def on_gpu(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the body for tensors: torch's, on the device of the session."""
        self._on_gpu = body

        def run(call: Call, *operands: Any) -> Any:
            return body(*operands, **call.node.attrs)

        withdraw(self.domain, self.name)
        lowers(self.name, domain=self.domain, types=self._types)(run)
        return body

    def withdraw(self) -> None:
        """Forget the operator; sessions that exist keep what they have."""
        withdraw(self.domain, self.name)
        unregister_op(self.domain, self.name)

    def __call__(self, *operands: Any, **attributes: Any) -> Any:
        kinds = {_kind(x) for x in operands if not isinstance(x, int | float)}
        if len(kinds) > 1:
            raise DeviceMismatch(f"{self.name}: operands are in different memories: {', '.join(sorted(kinds))}")
        if kinds == {"tensor"}:
            if self._on_gpu is None:
                raise InvalidInput(f"{self.name} has no body for tensors of a GPU")
            return self._on_gpu(*operands, **attributes)
        return self._body(*operands, **attributes)


def _kind(x: Any) -> str:
    if isinstance(x, np.ndarray | np.generic):
        return "array"
    return "tensor" if type(x).__module__.partition(".")[0] == "torch" else type(x).__name__


def _like_the_first(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(0)] * call.outputs


def gpu_dispatch(
    name: str, *, types: frozenset[DType] = ALL, infer: InferRule = _like_the_first
) -> Callable[[Callable[..., Any]], GpuDispatch]:
    """Declare an operator ``domain::Name`` by its body for arrays; ``types`` are those the body for tensors takes.
    ``infer`` tells the types of its results, without which nothing is run on another device: by itself they are like
    the first operand."""
    domain, _, op = name.rpartition("::")
    if not domain or not op:
        raise InvalidInput(f"an operator of one's own is called domain::Name, got {name!r}")

    def declare(body: Callable[..., Any]) -> GpuDispatch:
        register_op(domain, op, body, infer=infer)
        return GpuDispatch(domain, op, body, types)

    return declare


__all__ = ["GpuDispatch", "gpu_dispatch"]
