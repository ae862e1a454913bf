"""Everything a run consists of, as tensors and plain facts, and back.

States are found wherever they are: in modules, optimizers, schedules, averages, generators. Nested dicts and lists
come apart into tensors by path and a tree of plain values with the paths in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.nn.generator import Generator, default_generator
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import State

Array = np.ndarray[Any, Any]
_TENSOR = "$tensor"


def packed(tree: Any, path: str, tensors: dict[str, Array]) -> Any:
    """A tree as plain values; its tensors go into ``tensors`` under paths that begin with ``path``."""
    if isinstance(tree, Tensor | np.ndarray):
        if path in tensors:
            raise InvalidInput(f"two tensors are called {path!r}")
        tensors[path] = tree.numpy() if isinstance(tree, Tensor) else tree
        return {_TENSOR: path}
    if isinstance(tree, Mapping):
        items = [
            [key if isinstance(key, int) else str(key), packed(v, f"{path}.{key}", tensors)] for key, v in tree.items()
        ]
        return {"$dict": items}
    if isinstance(tree, list | tuple):
        return [packed(each, f"{path}.{k}", tensors) for k, each in enumerate(tree)]
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise InvalidInput(f"{path}: a {type(tree).__name__} cannot be saved")


def unpacked(tree: Any, tensors: Mapping[str, Array]) -> Any:
    """What ``packed`` took apart; tuples come back as lists."""
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return Tensor(tensors[tree[_TENSOR]])
        return {key: unpacked(each, tensors) for key, each in tree["$dict"]}
    return [unpacked(each, tensors) for each in tree] if isinstance(tree, list) else tree


def states_of(model: Module) -> Iterator[tuple[str, State]]:
    """All states of a model, those too that are not part of its ``state_dict``, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    seen = {id(default_generator.state)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Generator) and id(value.state) not in seen:
                seen.add(id(value.state))
                yield f"{path}.{name}.generator" if path else f"{name}.generator", value.state


def model_values(model: Module) -> dict[str, Array]:
    found = {f"model.{name}": state.numpy() for name, state in states_of(model)}
    return {**found, "generator": default_generator.state.numpy()}


def restore_model(model: Module, tensors: Mapping[str, Array]) -> None:
    own = {f"model.{name}": state for name, state in states_of(model)}
    own["generator"] = default_generator.state
    missing = [name for name in own if name not in tensors]
    strange = [n for n in tensors if n.startswith("model.") and n not in own]
    if missing or strange:
        said = [f"lacks {', '.join(missing[:6])}"] if missing else []
        said += [f"has {', '.join(strange[:6])}"] if strange else []
        raise InvalidInput(f"the checkpoint is of another model: it {' and '.join(said)}")
    for name, state in own.items():
        state.assign(Tensor(tensors[name]))


_OF_TENSORS = True
