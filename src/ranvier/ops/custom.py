"""Operators of the user's own: a Python function over NumPy arrays, under a domain and a name."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.domains import normal_domain
from ranvier.errors import InvalidConfig, InvalidValue, nearest
from ranvier.graph.types import Type
from ranvier.ops import registry
from ranvier.ops.registry import Body, OpDef, TypeCall

InferRule = Callable[[TypeCall], Sequence[Type | None]]

_lock = threading.RLock()
_registered: dict[tuple[str, str, int], OpDef | None] = {}  # what each one replaced, to put it back


def register_op(
    domain: str,
    name: str,
    function: Body,
    *,
    version: int = 1,
    infer: InferRule | None = None,
    traits: Iterable[str] = (),
    replace: bool = False,
) -> OpDef:
    """Let models use ``function`` as the operator ``domain::name``, from ``version`` of the domain's opset on.

    Positional parameters are the operator's inputs, keyword-only ones its attributes; it returns an array, or a tuple
    of them for several outputs. ``infer`` gives the output types, so that memory can be planned; without it they are
    known when they are computed. A function whose results differ from call to call needs ``traits=("random",)``, one
    that does something besides computing ``("impure",)``: others may be called once, at load, on constants.

    An operator that is there already is only replaced with ``replace=True``; sessions that exist keep what they have.

    >>> _ = register_op("example", "Scale", lambda x, *, by=2.0: x * np.float32(by))
    >>> registry.evaluate("Scale", np.float32([1, 2]), domain="example", by=3.0)
    array([3., 6.], dtype=float32)
    >>> unregister_op("example", "Scale")
    """
    domain = normal_domain(domain)
    label = f"operator {domain + '::' if domain else ''}{name}"
    _check(label, name, function, version, traits)
    key = (domain, name, version)
    with _lock:
        present = registry.find(domain, name, version)
        newer_version = present is not None and present.since < version and (domain, name, present.since) in _registered
        if present is not None and not newer_version and not replace:
            raise InvalidConfig(f"{label} is already declared, for version {present.since}; pass replace=True")
        definition = OpDef(_body(function, name), name, domain, version, frozenset(traits))
        if infer is not None:
            definition.infer(infer)
        _registered.setdefault(key, _exactly(domain, name, version))
        _put(key, definition)
    return definition


def unregister_op(domain: str, name: str, *, version: int | None = None) -> None:
    """Take an operator back, in one version or in all; what it had replaced is there again."""
    domain = normal_domain(domain)
    with _lock:
        keys = [k for k in _registered if k[:2] == (domain, name) and version in (None, k[2])]
        if not keys:
            known = [f"{d}::{n}" if d else n for d, n, _ in _registered]
            full = f"{domain}::{name}" if domain else name
            raise InvalidConfig(f"operator {full} was not registered{nearest(full, known)}")
        for key in keys:
            _put(key, _registered.pop(key))


def is_replaced(domain: str, name: str, version: int) -> bool:
    """Is the operator at this version somebody's own function?"""
    found = registry.find(domain, name, version)
    return found is not None and (domain, name, found.since) in _registered


def _put(key: tuple[str, str, int], definition: OpDef | None) -> None:
    """Set or, with None, remove the declaration of one version; readers see the list before or after, never between."""
    domain, name, version = key
    versions = [d for d in registry._OPS.get((domain, name), ()) if d.since != version]
    if definition is not None:
        versions.append(definition)
    if versions:
        registry.replace(domain, name, versions)
    else:
        registry.forget(domain, name)


def _exactly(domain: str, name: str, version: int) -> OpDef | None:
    return next((d for d in registry._OPS.get((domain, name), ()) if d.since == version), None)


def _check(label: str, name: str, function: Any, version: Any, traits: Iterable[str]) -> None:
    if not name or not isinstance(name, str):
        raise InvalidConfig(f"an operator needs a name, got {name!r}")
    if not callable(function):
        raise InvalidConfig(f"{label}: expected a function, got {type(function).__name__}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidConfig(f"{label}: version must be a whole number of 1 or more, got {version!r}")
    for trait in traits:
        if trait not in registry.TRAITS:
            raise InvalidConfig(f"{label}: unknown trait {trait!r}{nearest(trait, registry.TRAITS)}")


def _body(function: Body, name: str) -> Body:
    """The function with results made sure of: a Python number becomes an array, anything that is no value raises."""

    def call(*inputs: Any, **attributes: Any) -> Any:
        result = function(*inputs, **attributes)
        if isinstance(result, tuple):
            return tuple(_value(item, name) for item in result)
        return _value(result, name)

    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # a NumPy ufunc and other compiled functions: operands only
        return lambda *inputs: call(*inputs)
    return functools.wraps(function)(call)


def _value(result: Any, name: str) -> Any:
    if result is None or isinstance(result, np.ndarray | list | dict):
        return result
    if isinstance(result, np.generic | bool | int | float | complex | str):
        return np.asarray(result, dtype=object if isinstance(result, str) else None)
    raise InvalidValue(f"{name}: the function returned {type(result).__name__}, expected an array", op=name)


__all__ = ["register_op", "unregister_op"]
