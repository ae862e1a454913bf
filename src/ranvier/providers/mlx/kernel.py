"""A part as one lazy function over arrays of mlx, evaluated once at its end."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, KernelError, OutOfMemory, RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.providers.base import Array, CompileContext, Subgraph
from ranvier.providers.foreign import ForeignKernel, needed_on_host
from ranvier.providers.mlx.library import dtype_of, mx, to_mlx, to_numpy
from ranvier.providers.mlx.table import Call, Lowering, lowering_of
from ranvier.providers.part_model import check_results

_FUNCTIONS = 16  # compiled for different contents of operands that shape the results


class MlxKernel(ForeignKernel):
    """Values that only shape others (sizes, axes, pads) are computed by the operators' NumPy bodies while the function
    is built, so mlx never has to stop for one of them."""

    holds_constants = True

    def __init__(self, part: Subgraph, ctx: CompileContext, gate: threading.Lock, device: Any, *, fuse: bool) -> None:
        self._gate = gate
        self._device = device
        self._fuse = fuse
        self._opsets = ctx.opsets
        self._types = tuple(value.type for value in part.outputs)
        self._outputs = part.outputs
        self._lowerings = [(node, _known(node)) for node in part.nodes]
        self._on_host = needed_on_host(self._lowerings)
        on_device = {v for node, low in self._lowerings for v in self._read_on_device(node, low)} | set(part.outputs)
        fixed = [v for v in part.inputs if v.const is not None and v.producer is None]
        given = [(v, k) for k, v in enumerate(part.inputs) if v.const is None or v.producer is not None]
        self._given = [(v, k) for v, k in given if v in on_device]
        self._shaping = [(v, k) for v, k in given if v in self._on_host]
        with gate, mx.stream(device):
            self._fixed = {v: to_mlx(v.const.numpy()) for v in fixed if v in on_device and v.const is not None}
            self._fixed_on_host = {v: v.const.numpy() for v in fixed if v in self._on_host and v.const is not None}
            self._prepared = self._prepare()
            mx.eval(list(self._fixed.values()), list(self._prepared.values()))
        self._messages: list[str] = []  # of the requirements, in the order of their conditions
        self._functions: OrderedDict[Any, Callable[[list[Any]], list[Any]]] = OrderedDict()
        super().__init__(sum(a.nbytes for a in [*self._fixed.values(), *self._prepared.values()]))

    @property
    def source(self) -> str:
        return "\n".join(
            f"{node!r}  # {'numpy' if self._is_host(node, low) else low.function.__name__}"
            for node, low in self._lowerings
        )

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        try:
            with self._gate, mx.stream(self._device):
                function = self._function([(value, inputs[k]) for value, k in self._shaping])
                found = function([to_mlx(inputs[k]) for _, k in self._given])
                mx.eval(found)
                results, conditions = found[: len(self._outputs)], found[len(self._outputs) :]
                for condition, message in zip(conditions, self._messages):
                    if not condition.item():
                        raise InvalidValue(message)
                arrays = [to_numpy(result) for result in results]
        except RanvierError:
            raise
        except Exception as error:
            text = f"mlx: {error}"
            if "malloc" in text:
                raise OutOfMemory(text) from error
            raise KernelError(text, provider="mlx") from error
        check_results(self._types, arrays, dims, "mlx")
        outputs[:] = arrays
        self._count(started)

    def _is_host(self, node: Node, lowering: Lowering) -> bool:
        return lowering.numpy or any(v in self._on_host for v in node.outputs)

    def _read_on_device(self, node: Node, lowering: Lowering) -> list[Value]:
        """The operands that a node wants from mlx; of those whose size alone is asked, that has to be known too."""
        if self._is_host(node, lowering):
            return [v for v in node.inputs if v is not None] if lowering.numpy else []
        return [v for k, v in enumerate(node.inputs) if v is not None and k not in lowering.host]

    def _prepare(self) -> dict[tuple[Node, int], Any]:
        """Constants in the form that a lowering wants; they are kept in no other where nobody else reads them."""
        made: dict[tuple[Node, int], Any] = {}
        for node, lowering in self._lowerings:
            for position, prepare in lowering.prepares.items():
                value = node.input(position)
                if value in self._fixed and not self._is_host(node, lowering):
                    made[node, position] = prepare(_widened(self._fixed[value], lowering), node)
        prepared = {node.input(position) for node, position in made}
        for value in prepared:
            if value is not None and all((user, k) in made for user, k in value.uses) and value not in self._outputs:
                del self._fixed[value]
        return made

    def _function(self, shaping: Sequence[tuple[Value, Array]]) -> Callable[[list[Any]], list[Any]]:
        """What computes the part, for these contents of the operands that shape it."""
        if not self._fuse:
            return lambda given: self._trace(given, shaping)
        key = tuple((a.shape, a.dtype.name, a.tobytes()) for _, a in shaping)
        found = self._functions.get(key)
        if found is None:
            kept = [(value, array.copy()) for value, array in shaping]
            found = self._functions[key] = mx.compile(lambda given: self._trace(given, kept))
            if len(self._functions) > _FUNCTIONS:
                self._functions.popitem(last=False)
        self._functions.move_to_end(key)
        return found

    def _trace(self, given: Sequence[Any], shaping: Sequence[tuple[Value, Array]]) -> list[Any]:
        """The results, then the conditions that must hold, all of them lazy."""
        lazy: dict[Value, Any] = {**self._fixed, **{v: a for (v, _), a in zip(self._given, given)}}
        host: dict[Value, Array] = {**self._fixed_on_host, **dict(shaping)}
        conditions: list[Any] = []
        messages: list[str] = []
        for node, lowering in self._lowerings:
            if self._is_host(node, lowering):
                host.update(zip(node.outputs, self._by_body(node, lowering, lazy, host)))
                continue
            call = Call(node)
            operands = [self._operand(node, k, lowering, lazy, host) for k in range(len(node.inputs))]
            results = lowering.function(call, *operands)
            for value, result in zip(node.outputs, results if isinstance(results, tuple) else (results,)):
                lazy[value] = _narrowed(result, value) if lowering.wide else result
            for condition, message in call.requirements:
                conditions.append(condition)
                messages.append(message)
        self._messages = messages
        return [_lazy(value, lazy, host) for value in self._outputs] + conditions

    def _operand(
        self, node: Node, position: int, lowering: Lowering, lazy: dict[Value, Any], host: dict[Value, Array]
    ) -> Any:
        value = node.input(position)
        if value is None:
            return None
        if position in lowering.host:
            return host[value]
        if (node, position) in self._prepared:
            return self._prepared[node, position]
        found = _widened(_lazy(value, lazy, host), lowering)
        prepare = lowering.prepares.get(position)
        return found if prepare is None else prepare(found, node)

    def _by_body(
        self, node: Node, lowering: Lowering, lazy: dict[Value, Any], host: dict[Value, Array]
    ) -> Sequence[Any]:
        """The operator's own NumPy body."""
        operands: list[Any] = []
        for value in node.inputs:
            if value is None or value in host:
                operands.append(None if value is None else host[value])
            else:  # of which only the shape is looked at
                operands.append(np.broadcast_to(np.zeros((), np.int8), tuple(lazy[value].shape)))
        definition = registry.get(node.domain, node.op, node.version)
        call = registry.Call((True,) * len(node.outputs), node.version, node=node, opsets=self._opsets)
        with np.errstate(all="ignore"):
            return definition.apply(operands, dict(node.attrs), call, None)


def _known(node: Node) -> Lowering:
    found = lowering_of(node)
    if found is None:
        raise KernelError("mlx: it is not lowered", node=node.name, op=node.op, provider="mlx")
    return found


def _lazy(value: Value, lazy: dict[Value, Any], host: Mapping[Value, Array]) -> Any:
    if value not in lazy:
        lazy[value] = to_mlx(host[value])
    return lazy[value]


def _widened(array: Any, lowering: Lowering) -> Any:
    return array.astype(mx.float32) if lowering.wide and array.dtype in (mx.float16, mx.bfloat16) else array


def _narrowed(result: Any, value: Value) -> Any:
    wanted = value.type.dtype if isinstance(value.type, TensorType) else None
    return result if wanted is None or result is None else result.astype(dtype_of(wanted))
