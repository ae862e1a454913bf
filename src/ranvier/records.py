"""``dataclass`` as the standard library's, at a fraction of the time to declare one.

The library's own writes and compiles up to six methods for every class when its module is imported: half of the time
that importing Ranvier took. Here comparing, hashing, showing and refusing to change are done by functions that all
classes share, and ``__init__`` is compiled once for all classes with as many fields of the same kinds.
``fields``, ``replace``, ``asdict`` and ``match`` work as ever. What is rare (``order``, ``InitVar``, a frozen
record that inherits from another) is left to the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from functools import cache
    from operator import attrgetter
    from reprlib import recursive_repr
    from types import CodeType, FunctionType

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
        bases = [base.__dataclass_params__ for base in cls.__mro__[1:] if hasattr(base, "__dataclass_params__")]
        inherits = any(frozen or base.frozen for base in bases)
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
            cls.__init__ = _init(cls, frozen, slots)
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

    def _init(cls: type, frozen: bool, slots: bool) -> Any:
        """The ``__init__`` of a class: the code of another with as many fields of the same kinds, under its names."""
        names: list[str] = []
        kinds: list[str] = []
        defaults: list[Any] = []
        by_name: dict[str, Any] = {}
        makers: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            made = each.default_factory is not dataclasses.MISSING
            given = each.default is not dataclasses.MISSING
            if not each.init and not made and not (given and slots):
                continue  # somebody else sets it, or the class has it
            kind = ("made" if made else "plain") if each.init else "set"
            if kind != "plain":
                makers[f"_make{len(names)}"] = each.default_factory if made else _giving(each.default)
            default = _ABSENT if made else each.default
            if each.init and each.kw_only:
                kind += " by name"
                by_name |= {each.name: default} if made or given else {}
            elif each.init and (made or given):
                defaults.append(default)
            elif each.init and defaults:
                raise TypeError(f"field {each.name!r} without a default follows one that has a default")
            names.append(each.name)
            kinds.append(kind)
        code = _template(tuple(kinds), frozen, hasattr(cls, "__post_init__"))
        called = {f"_field{k}": name for k, name in enumerate(names)}
        code = code.replace(
            co_names=tuple(called.get(n, n) for n in code.co_names),
            co_varnames=tuple(called.get(n, n) for n in code.co_varnames),
            co_consts=tuple(called.get(c, c) if isinstance(c, str) else c for c in code.co_consts),
            co_qualname=f"{cls.__qualname__}.__init__",
        )
        found = FunctionType(code, {**_GLOBALS, **makers}, "__init__", tuple(defaults) or None)
        found.__kwdefaults__ = by_name or None
        found.__module__ = cls.__module__
        return found

    _ABSENT = object()
    _GLOBALS = {"_set": object.__setattr__, "_absent": _ABSENT}

    def _giving(value: Any) -> Any:
        return lambda: value

    @cache
    def _template(kinds: tuple[str, ...], frozen: bool, post_init: bool) -> CodeType:
        """Code for fields ``_field0``, ``_field1`` and so on."""
        lines = []
        for k, kind in enumerate(kinds):
            value = f"_field{k}"
            if kind.startswith("made"):
                value = f"_make{k}() if _field{k} is _absent else _field{k}"
            elif kind == "set":
                value = f"_make{k}()"
            lines.append(f"_set(self, '_field{k}', {value})" if frozen else f"self._field{k} = {value}")
        if post_init:
            lines.append("self.__post_init__()")
        given = [(f"_field{k}", kind.endswith("by name")) for k, kind in enumerate(kinds) if kind != "set"]
        plain, named = ([name for name, only in given if only is which] for which in (False, True))
        parameters = ", ".join(["self", *plain, *(["*", *named] if named else [])])
        text = f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"])
        module = compile(text, "<record>", "exec")
        return next(each for each in module.co_consts if isinstance(each, CodeType))


__all__ = ["dataclass"]
