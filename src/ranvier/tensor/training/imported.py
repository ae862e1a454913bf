"""Loaded models that learn: the weights of an ONNX file as parameters, its graph as a module, and a file again.

model = ranvier.trainable("resnet.onnx")
model.replace_head(classes=5)
model.freeze("*"), model.unfreeze(*model.head)
…                                   # any loss, any optimizer
model.export("mine.onnx")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig, InvalidInput, nearest
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.runtime.session import Session
from ranvier.tensor import random
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.manipulate import astype
from ranvier.tensor.nn.functional.sparse import dropout
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.precision import autocast_dtype
from ranvier.tensor.state import Parameter, Setting, State
from ranvier.tensor.training import adapters
from ranvier.tensor.training.learned import roles_of
from ranvier.tensor.training.lowering import LEARNING, Steps, copied, decide, settle, steps_of

Array = np.ndarray[Any, Any]


def trainable(
    model: Any,
    *,
    frozen: str | Iterable[str] = (),
    logits: bool = False,
    fixed: Mapping[str, Any] | None = None,
) -> Imported:
    """A model of an ONNX file, or a graph, as a module: its float weights are parameters.

    ``frozen``: patterns of names that are not to be learned; see ``Imported.freeze``. ``logits``: where an output is a
    softmax or a sigmoid, the module gives what goes into it, as losses want it; the exported file still has it.
    ``fixed``: inputs that are always the same, by name (a sampling rate, for example): branches that depend on them are
    decided, and the exported file no longer has them.
    """
    if isinstance(model, Graph):
        graph, _ = copied(model)
    elif isinstance(model, Session):
        raise InvalidInput(
            "a session has rewritten its model for running; give trainable() the file it was loaded from"
        )
    else:
        graph = onnx_format.read(model)
    for name, value in (fixed or {}).items():
        own = next((v for v in graph.inputs if v.name == name), None)
        if own is None:
            raise InvalidInput(f"{name!r} is no input of the model{nearest(name, [v.name for v in graph.inputs])}")
        kind = getattr(own.type, "dtype", None)
        graph.defaults[name] = ConstTensor.of(np.asarray(value, None if kind is None else kind.numpy))
    if fixed:
        decide(graph)
    found = Imported(graph, logits=logits)
    patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    if patterns:
        found.freeze(*patterns)
    return found


class Imported(Module):
    """A loaded model as a module. Parameters and buffers have the names of the file's initializers."""

    def __init__(self, graph: Graph, *, logits: bool = False) -> None:
        super().__init__()
        self.head: list[str] = []  # the weights that replace_head made; set before a weight may be called so
        self.graph = graph
        self._segments = Setting(1)
        self._logits = logits
        settle(graph)
        roles = roles_of(graph)
        for name, first in roles.same.items():
            value = graph.constants[name]
            value.replace_by(graph.constants[first])
            graph.remove_constant(value)
        for name in roles.learned:
            if name not in roles.same:
                self._learn(name)
        for name in roles.followed:
            self._buffers[name] = State(_array(graph, name), name=name)
        self._adapters: list[adapters.Adapter] = []
        self._lowered: dict[Any, Steps] = {}
        self.input_names = [value.name for value in graph.inputs]
        self.output_names = [value.name for value in graph.outputs]

    def _learn(self, name: str) -> None:
        self._parameters[name] = Parameter(_array(self.graph, name), name=name)

    @property
    def segments(self) -> int:
        """In how many parts it is computed whose inner values are not kept for the gradient, but computed again; 1:
        everything is kept."""
        return self._segments.value

    @segments.setter
    def segments(self, number: int) -> None:
        self._segments.value = number

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs for inputs in the order of the file, or by name: one tensor, or a tuple where there are more."""
        inputs = self._inputs(args, kwargs)
        learned = [p for p in self._parameters.values() if p is not None]
        states = [s for s in self._buffers.values() if s is not None]
        steps = self._steps(inputs)
        masks = [dropout(Tensor(np.ones(m.shape, m.dtype.numpy)), m.ratio, self.training) for m in steps.masks]
        device = learned[0]._expr.device if learned else inputs[0]._expr.device if inputs else None
        given = [each._expr for each in (*inputs, *learned, *states, *masks)]
        made = steps.follow(given, device, autocast_dtype(), self.segments if self.training else 1)
        for name, k in steps.renewed:
            state = self._buffers[name]
            assert state is not None
            state.assign(wrapped(made[k]))
        results = tuple(wrapped(made[k]) for k in steps.outputs)
        return results[0] if len(results) == 1 else results

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        names = self.input_names
        if len(args) > len(names):
            raise InvalidInput(f"the model has {len(names)} inputs, {len(args)} were given")
        given = dict(zip(names, args))
        for name, value in kwargs.items():
            if name not in names or name in given:
                what = "is given twice" if name in given else f"is no input of the model{nearest(name, names)}"
                raise InvalidInput(f"{name!r} {what}")
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise InvalidInput(f"the model also needs {', '.join(missing)}")
        found = []
        for value in self.graph.inputs:
            own = as_tensor(given[value.name])
            want = getattr(value.type, "dtype", None)
            found.append(own if want is None or own.dtype is want else astype(own, want))
        return found

    def _steps(self, inputs: list[Tensor]) -> Steps:
        training = self._learning_nodes()
        key = (tuple((x.dtype, x.shape) for x in inputs), training)
        if key not in self._lowered:
            types = {name: (x.dtype, x.shape) for name, x in zip(self.input_names, inputs)}
            whole = self.graph.outputs
            if self._logits:
                self.graph.outputs = [adapters.before_final(value) for value in whole]
            try:
                self._lowered[key] = steps_of(self.graph, types, list(self._parameters), list(self._buffers), training)
            finally:
                self.graph.outputs = whole
        return self._lowered[key]

    def _learning_nodes(self) -> frozenset[str]:
        """Nodes that behave as they do while a model learns: none of them when it does not, and no normalization whose
        own weights are frozen, because what was learned around it relies on its means."""
        if not self.training:
            return frozenset()
        found = set()
        for node in self.graph:
            if node.domain or node.op not in LEARNING:
                continue
            own = [self._parameters.get(v.name) for v in node.inputs[1:3] if v is not None]
            if node.op == "Dropout" or any(p is not None and p.requires_grad for p in own):
                found.add(node.name)
        return frozenset(found)

    # -- what is learned --------------------------------------------------------------------------------------------

    def freeze(self, *patterns: str) -> Imported:
        """Learn none of the parameters whose names fit a pattern (``*`` and ``?`` stand for anything)."""
        return self._wanted(patterns, False)

    def unfreeze(self, *patterns: str) -> Imported:
        return self._wanted(patterns, True)

    def _wanted(self, patterns: tuple[str, ...], wanted: bool) -> Imported:
        for pattern in patterns:
            chosen = [p for name, p in self._parameters.items() if p is not None and _fits(name, pattern)]
            if not chosen:
                raise InvalidConfig(f"no parameter fits {pattern!r}{nearest(pattern, self._parameters)}")
            for parameter in chosen:
                parameter.requires_grad = wanted
        return self

    def learned(self) -> list[Parameter]:
        """The parameters that are not frozen: what an optimizer is given."""
        return [p for p in self.parameters() if p.requires_grad]

    def lora(
        self,
        rank: int = 8,
        targets: str | Iterable[str] = "*",
        *,
        alpha: float | None = None,
        seed: int = 0,
        freeze: bool = True,
    ) -> list[str]:
        """Put adapters of low rank beside the weights of products and convolutions whose names (or whose nodes' names)
        fit a pattern; the names of the adapters' weights. ``freeze``: nothing else is learned from now on."""
        if rank < 1:
            raise InvalidConfig(f"an adapter has a rank of at least 1, not {rank}")
        patterns = (targets,) if isinstance(targets, str) else tuple(targets)
        chosen = list(adapters.places(self.graph, lambda name: any(_fits(name, p) for p in patterns)))
        taken = {adapter.weight for adapter in self._adapters}
        chosen = [(node, weight) for node, weight in chosen if weight.name not in taken and len(weight.uses) == 1]
        if not chosen:
            raise InvalidConfig(f"no product or convolution with a weight of its own fits {', '.join(patterns)}")
        self._write_back()
        if freeze:
            self.freeze("*")
        made: list[str] = []
        for k, (node, weight) in enumerate(chosen):
            draw = _uniform(seed, k)
            adapter = adapters.adapt(self.graph, node, weight, rank, (alpha or rank) / rank, draw)
            self._adapters.append(adapter)
            made += [adapter.first, adapter.second]
        for name in made:
            self._learn(name)
        self._lowered.clear()
        return made

    def replace_head(self, classes: int, *, seed: int = 0, keep_softmax: bool = False) -> Imported:
        """Give a classifier another number of classes: a new last product, its weights drawn as PyTorch's ``Linear``
        does. A softmax behind it goes unless it is to be kept: losses take scores."""
        self._write_back()
        self.head[:] = adapters.replace_head(self.graph, classes, _uniform(seed, 0), keep_softmax)
        for name in self.head:
            self._learn(name)
        for name in [n for n in self._parameters if n not in self.graph.constants]:
            del self._parameters[name]
        self._lowered.clear()
        return self

    # -- back to a file ---------------------------------------------------------------------------------------------

    def export(
        self, path: str | os.PathLike[str], *, merge_lora: bool = True, external_data: bool | None = None
    ) -> None:
        """Write the model as ONNX with the weights as they are now; adapters are added to the weights they stand
        beside, or stay nodes of their own."""
        onnx_format.save(self.exported(merge_lora=merge_lora), path, external_data=external_data)

    def exported(self, *, merge_lora: bool = True) -> Graph:
        """The graph that ``export`` writes."""
        self._write_back()
        graph, constants = copied(self.graph)
        for old, new in zip((*self.graph.inputs, *self.graph.outputs), (*graph.inputs, *graph.outputs)):
            new.name = old.name
        if merge_lora and self._adapters:
            for adapter in self._adapters:
                weight = constants[adapter.weight]
                whole = _array(self.graph, adapter.weight)
                delta = adapter.delta(_array(self.graph, adapter.first), _array(self.graph, adapter.second))
                weight.const = ConstTensor.of((whole.astype(np.float64) + delta).astype(whole.dtype))
            adapters.without_adapters(graph)
        return graph

    def _write_back(self) -> None:
        """Let the graph hold what was learned."""
        for name, state in [*self._parameters.items(), *self._buffers.items()]:
            if state is not None:
                self.graph.constants[name].const = ConstTensor.of(np.array(state.numpy()))

    def extra_repr(self) -> str:
        count = sum(p.size for p in self.parameters())
        learned = sum(p.size for p in self.learned())
        return f"{self.graph.name!r}, {len(self.graph)} nodes, {count:,} parameters, {learned:,} learned"


def _array(graph: Graph, name: str) -> Array:
    const = graph.constants[name].const
    assert const is not None
    return np.array(const.numpy())


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _uniform(seed: int, number: int) -> Callable[..., Array]:
    key = random.fold_in(random.key(seed), number)

    def draw(shape: tuple[int, ...], bound: float) -> Array:
        return random.uniform(key, shape, low=-bound, high=bound).numpy()

    return draw


_OF_TENSORS = True
