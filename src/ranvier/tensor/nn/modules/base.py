"""A module: parameters, buffers and other modules under names, and what is computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ranvier import dtypes
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor
from ranvier.tensor.manipulate import astype
from ranvier.tensor.nn.generator import Generator, default_generator
from ranvier.tensor.state import Constant, Parameter, Setting, State

M = TypeVar("M", bound="Module")


class Loaded(NamedTuple):
    """What did not fit when values were loaded: names without a value, and values without a name."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def told(self) -> str:
        said = {"without a value": self.missing_keys, "not known here": self.unexpected_keys}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in said.items() if names)


class Module:
    """Write ``__init__`` (first calling ``super().__init__()``) and ``forward``; call the module itself.

    An attribute that is a :class:`Parameter` or a module is found under its name by ``named_parameters`` and the like.
    """

    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, State | None]
    _modules: dict[str, Module | None]
    _fleeting: set[str]  # buffers that are not saved
    _training: Setting[bool]

    def __init__(self) -> None:
        for name, value in (
            ("_parameters", {}),
            ("_buffers", {}),
            ("_modules", {}),
            ("_fleeting", set()),
            ("_training", Setting(True)),
        ):
            object.__setattr__(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidInput(f"{type(self).__name__} does not say what it computes: it has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # -- attributes -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        for kind in ("_parameters", "_buffers", "_modules"):
            held = self.__dict__.get(kind)
            if held is not None and name in held:
                return held[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            if isinstance(value, State | Module):
                raise InvalidInput(f"{type(self).__name__}.__init__ sets {name!r} before it calls super().__init__()")
            object.__setattr__(self, name, value)
        elif isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            self.add_module(name, value)
        elif name in self._parameters:
            if value is not None:
                raise InvalidInput(f"{name!r} is a parameter; assign to it with {name}.assign(value)")
            self._parameters[name] = None
        elif name in self._modules and value is None:
            self._modules[name] = None
        elif name in self._buffers:
            self.register_buffer(name, value, persistent=name not in self._fleeting)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        for held in (self._parameters, self._buffers, self._modules):
            if name in held:
                del held[name]
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def _put(self, kind: dict[str, Any], name: str, value: Any) -> None:
        """Under a name that nothing else has then; what was there among its kind hands its place on."""
        for held in (self.__dict__, self._parameters, self._buffers, self._modules):
            if held is not kind:
                held.pop(name, None)
        kind[name] = value

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        self._put(self._parameters, name, param)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """A state that is not learned; ``persistent``: it is saved with the others."""
        self._put(self._buffers, name, tensor if tensor is None or isinstance(tensor, State) else State(tensor))
        self._fleeting.discard(name)
        if not persistent:
            self._fleeting.add(name)

    def add_module(self, name: str, module: Module | None) -> None:
        if "." in name or not name:
            raise InvalidInput(f"not a module's name: {name!r}")
        self._put(self._modules, name, module)

    register_module = add_module

    # -- what is inside ---------------------------------------------------------------------------------------------

    def named_modules(self, prefix: str = "", *, _seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
        """This module and all inside it, each once."""
        seen = set() if _seen is None else _seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(f"{prefix}.{name}" if prefix else name, _seen=seen)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((name, module) for name, module in self._modules.items() if module is not None)

    def children(self) -> Iterator[Module]:
        return (module for _, module in self.named_children())

    def get_submodule(self, target: str) -> Module:
        found: Module = self
        for name in target.split(".") if target else ():
            inner = found._modules.get(name)
            if inner is None:
                raise AttributeError(f"{type(found).__name__} has no module {name!r}")
            found = inner
        return found

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Parameters with their names; one that is used in several places comes once, under its first."""
        return self._named("_parameters", prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, State]]:
        return self._named("_buffers", prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[State]:
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, kind: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else [(prefix, self)]:
            for name, value in getattr(module, kind).items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{path}.{name}" if path else name), value

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Values of parameters and buffers, by name, as they are now."""
        return {name: state.value for name, state in self._saved()}

    def _saved(self, prefix: str = "") -> Iterator[tuple[str, State]]:
        """Everything with a name, in PyTorch's order; what is shared comes under each of its names."""
        for name, param in self._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in self._buffers.items():
            if buffer is not None and name not in self._fleeting:
                yield prefix + name, buffer
        for name, module in self._modules.items():
            if module is not None:
                yield from module._saved(f"{prefix}{name}.")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Loaded:
        """Take over values: tensors, NumPy arrays or PyTorch's tensors. With ``strict`` all names must be the same."""
        own = dict(self._saved())
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        if strict and (missing or unexpected):
            raise InvalidInput(f"the values do not fit {type(self).__name__}; {Loaded(missing, unexpected).told()}")
        values: dict[str, Tensor] = {}
        for name, state in own.items():
            if name not in state_dict:
                continue
            given = state_dict[name]
            given = given.detach() if hasattr(given, "detach") else given
            found = given if isinstance(given, Tensor) else Tensor(given)
            if found.shape != state.shape:
                raise ShapeMismatch(f"{name} has the shape {list(state.shape)}, not {list(found.shape)}")
            values[name] = astype(found, state.dtype)
        for name, value in values.items():
            own[name].assign(value)
        return Loaded(missing, unexpected)

    # -- modes ------------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self._training.value

    @training.setter
    def training(self, mode: bool) -> None:
        self._training.value = bool(mode)

    def train(self: M, mode: bool = True) -> M:
        """Let layers that behave differently while training (dropout, batch norm) do so."""
        for module in self.modules():
            module._training.value = bool(mode)
        return self

    def eval(self: M) -> M:
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        for param in self.parameters():
            param.requires_grad = requires_grad
        return self

    def zero_grad(self) -> None:
        for param in self.parameters():
            param.grad = None

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Call a function with every module inside, the innermost first."""
        for module in self.children():
            module.apply(fn)
        fn(self)
        return self

    def to_device(self: M, device: Any) -> M:
        """Put parameters and buffers on a device, and draw random numbers there."""
        for generator in {id(g): g for g in (default_generator, *self._generators())}.values():
            generator.to_device(device)
        return self.to(device=device)

    def _generators(self) -> Iterator[Generator]:
        for module in self.modules():
            found = module.__dict__.get("generator")
            if isinstance(found, Generator):
                yield found

    def to(self: M, dtype: Any = None, device: Any = None) -> M:
        """Change the type of all floating-point parameters and buffers, or their device. Codes stay what they are."""
        kind = None if dtype is None else dtypes.of(dtype)
        for state in [*self.parameters(), *self.buffers()]:
            if isinstance(state, Constant):
                if device is not None:
                    state.put_on(device)
                continue
            value = state.value
            if kind is not None and value.dtype.is_float:
                value = astype(value, kind)
            state._replace((value if device is None else value.to_device(device))._expr)
        return self

    def double(self: M) -> M:
        return self.to("float64")

    def float(self: M) -> M:
        return self.to("float32")

    def half(self: M) -> M:
        return self.to("float16")

    def bfloat16(self: M) -> M:
        return self.to("bfloat16")

    # -- for people -------------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """What stands between the brackets."""
        return ""

    def __repr__(self) -> str:
        head, inner = self.extra_repr(), []
        for name, module in self.named_children():
            inner.append(f"({name}): " + repr(module).replace("\n", "\n  "))
        if not inner:
            return f"{type(self).__name__}({head})"
        lines = ([head] if head else []) + inner
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


_OF_TENSORS = True
