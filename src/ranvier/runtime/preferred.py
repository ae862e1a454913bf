"""What the user prefers while nobody lists providers.

Preferences belong to the thread, or the asynchronous task, that set them; sessions made there with the providers
``auto`` ask what is preferred first and everybody else afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ranvier.config import resolve
from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.providers.registry import REGISTRY

_backend: ContextVar[str | None] = ContextVar("ranvier backend", default=None)
_priority: ContextVar[tuple[str, ...]] = ContextVar("ranvier backend priority", default=())


def set_backend(name: str | None) -> None:
    """Prefer one provider to all others; None: no longer."""
    _backend.set(None if name is None else _known(name))


def set_backend_priority(names: Sequence[str]) -> None:
    """Ask these providers first, in this order; an empty list: costs decide again."""
    if isinstance(names, str):
        raise InvalidConfig(f"a list of providers is wanted, got {names!r}")
    _priority.set(tuple(dict.fromkeys(_known(name) for name in names)))


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Prefer one provider inside a ``with`` block."""
    token = _backend.set(None if name is None else _known(name))
    try:
        yield
    finally:
        _backend.reset(token)


def preferred() -> tuple[str, ...]:
    """Names of the providers to ask before all others, in order."""
    first = _backend.get()
    return tuple(dict.fromkeys([*([first] if first else []), *_priority.get()]))


def _known(name: str) -> str:
    if not isinstance(name, str):
        raise InvalidConfig(f"a provider's name is wanted, got {name!r}")
    try:
        return REGISTRY.get(name).name
    except ProviderUnavailable:  # with the options that sessions will have it may be there
        options = resolve().config.provider_options.get(REGISTRY.resolve(name))
        if not options:
            raise
    return REGISTRY.get(name, options).name


__all__ = ["backend", "preferred", "set_backend", "set_backend_priority"]
