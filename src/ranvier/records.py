"""``dataclass`` as the standard library's, ten times as cheap to declare.

The library's own writes and compiles up to six methods for every class when its module is imported: half of the time
that importing Ranvier took. Here comparing, hashing, showing and refusing to change are done by functions that all
classes share, and a class gets its ``__init__`` when the first instance is made, which most never are in one process.
``fields``, ``replace``, ``asdict`` and ``match`` work as ever. What is rare (``order``, ``InitVar``, a record that
inherits from another) is left to the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        return _made(cls, **options) if cls is not None else lambda found: _made(found, **options)

    def _made(
        cls: type,
        *,
        frozen: bool = False,
        eq: bool = True,
        slots: bool = False,
        unsafe_hash: bool = False,
        **others: bool,
    ) -> type:
        inherits = any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:])
        if inherits or others or "InitVar" in str(getattr(cls, "__annotations__", "")):
            return dataclasses.dataclass(frozen=frozen, eq=eq, slots=slots, unsafe_hash=unsafe_hash, **others)(cls)
        own = set(cls.__dict__)
        hashes = "__hash__" in own and not (cls.__dict__["__hash__"] is None and "__eq__" in own)
        if cls.__doc__ is None:
            cls.__doc__ = cls.__name__  # else the library would work out a signature to put there
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
        cls.__dataclass_params__.frozen, cls.__dataclass_params__.eq = frozen, eq
        fields = dataclasses.fields(cls)
        if "__init__" not in own:
            cls.__init__ = _first_init(cls, frozen, slots)
        if "__repr__" not in own:
            cls.__repr__ = _repr(tuple(f.name for f in fields if f.repr))
        if eq and "__eq__" not in own:
            cls.__eq__ = _eq(_getter([f.name for f in fields if f.compare]))
        if unsafe_hash or (eq and frozen and not hashes):
            cls.__hash__ = _hash(_getter([f.name for f in fields if (f.compare if f.hash is None else f.hash)]))
        elif eq and not frozen and not hashes:
            cls.__hash__ = None
        if frozen:
            _freeze(cls, frozenset(f.name for f in fields))
            if slots:
                cls.__getstate__, cls.__setstate__ = _get_state, _set_state
        return cls

    def _getter(names: list[str]) -> Any:
        """All these attributes of an object as one tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        if not names:
            return lambda self: ()
        (name,) = names
        return lambda self: (getattr(self, name),)

    def _repr(names: tuple[str, ...]) -> Any:
        @recursive_repr("...")
        def __repr__(self: Any) -> str:
            return f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

        return __repr__

    def _eq(content: Any) -> Any:
        def __eq__(self: Any, other: Any) -> Any:
            return content(self) == content(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash(content: Any) -> Any:
        def __hash__(self: Any) -> int:
            return hash(content(self))

        return __hash__

    def _freeze(cls: type, names: frozenset[str]) -> None:
        def __setattr__(self: Any, name: str, value: Any) -> None:
            if type(self) is cls or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
            super(cls, self).__setattr__(name, value)

        def __delattr__(self: Any, name: str) -> None:
            if type(self) is cls or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
            super(cls, self).__delattr__(name)

        cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__

    def _get_state(self: Any) -> list[Any]:
        return [getattr(self, f.name) for f in dataclasses.fields(self)]

    def _set_state(self: Any, state: list[Any]) -> None:
        for each, value in zip(dataclasses.fields(self), state):
            object.__setattr__(self, each.name, value)

    def _first_init(cls: type, frozen: bool, slots: bool) -> Any:
        """An ``__init__`` that puts the real one in its place."""

        def __init__(self: Any, *args: Any, **given: Any) -> None:
            made = _written_init(cls, frozen, slots)
            if cls.__dict__.get("__init__") is __init__:
                cls.__init__ = made
            made(self, *args, **given)

        return __init__

    def _written_init(cls: type, frozen: bool, slots: bool) -> Any:
        names: dict[str, Any] = {"_set": object.__setattr__, "_absent": object()}
        positional, by_name, lines = [], [], []
        for each in dataclasses.fields(cls):
            name, default, factory = each.name, each.default, each.default_factory
            names |= {f"_default_{name}": default, f"_make_{name}": factory}
            value, parameter = name, name
            if factory is not dataclasses.MISSING:
                parameter = f"{name}=_absent"
                value = f"_make_{name}() if {name} is _absent else {name}" if each.init else f"_make_{name}()"
            elif default is not dataclasses.MISSING:
                parameter = f"{name}=_default_{name}"
                value = name if each.init else f"_default_{name}"
            if each.init:
                (by_name if each.kw_only else positional).append(parameter)
            elif factory is dataclasses.MISSING and (default is dataclasses.MISSING or not slots):
                continue  # somebody else sets it, or the class has it
            lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        parameters = ", ".join(["self", *positional, *(["*", *by_name] if by_name else [])])
        exec(f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"]), names)
        made = names["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        made.__module__ = cls.__module__
        return made


__all__ = ["dataclass"]
