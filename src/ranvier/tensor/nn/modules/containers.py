"""Modules of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

from ranvier.tensor.indexing import InvalidIndex
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import Parameter


class _Listed(Module):
    def _all(self) -> list[Module]:
        return list(self.children())

    def _at(self, k: int) -> int:
        size = len(self._modules)
        if not -size <= k < size:
            raise InvalidIndex(f"there is no module {k} of {size}")
        return k % size

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._all())

    def __setitem__(self, k: int, module: Module) -> None:
        self._modules[str(self._at(k))] = module


class Sequential(_Listed):
    """Modules one after the other: ``Sequential(first, second)``, or a dict of them by name."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            for k, module in enumerate(args):
                self.add_module(str(k), module)

    def forward(self, input: Any) -> Any:
        for module in self.children():
            input = module(input)
        return input

    @overload
    def __getitem__(self, k: int) -> Module: ...
    @overload
    def __getitem__(self, k: slice) -> Sequential: ...
    def __getitem__(self, k: int | slice) -> Module:
        if isinstance(k, slice):
            return Sequential(dict(list(self.named_children())[k]))
        return self._all()[self._at(k)]

    def append(self, module: Module) -> Sequential:
        self.add_module(str(len(self)), module)
        return self


class ModuleList(_Listed):
    """A list of modules."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    @overload
    def __getitem__(self, k: int) -> Module: ...
    @overload
    def __getitem__(self, k: slice) -> ModuleList: ...
    def __getitem__(self, k: int | slice) -> Module:
        return ModuleList(self._all()[k]) if isinstance(k, slice) else self._all()[self._at(k)]

    def append(self, module: Module) -> ModuleList:
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> None:
        found = self._all()
        found.insert(index, module)
        self._modules.clear()
        self.extend(found)


class ModuleDict(Module):
    """Modules by names."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def __getitem__(self, name: str) -> Module:
        found = self._modules[name]
        assert found is not None
        return found

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def keys(self) -> Iterable[str]:
        return self._modules.keys()

    def values(self) -> Iterable[Module]:
        return list(self.children())

    def items(self) -> Iterable[tuple[str, Module]]:
        return list(self.named_children())

    def update(self, modules: Mapping[str, Module]) -> None:
        for name, module in modules.items():
            self.add_module(name, module)


class ParameterList(Module):
    """A list of parameters."""

    def __init__(self, parameters: Iterable[Any] = ()) -> None:
        super().__init__()
        for each in parameters:
            self.append(each)

    def append(self, parameter: Any) -> ParameterList:
        found = parameter if isinstance(parameter, Parameter) else Parameter(parameter)
        self.register_parameter(str(len(self)), found)
        return self

    def __getitem__(self, k: int) -> Parameter:
        return list(self.parameters(recurse=False))[k]

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(list(self.parameters(recurse=False)))


class Identity(Module):
    """What it is given; takes any arguments, so that it can stand in for other modules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input


_OF_TENSORS = True
