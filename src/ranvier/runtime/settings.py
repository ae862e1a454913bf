"""The options a session is made with: put together, and those of its providers checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.config import ProviderConfig, SessionConfig, resolve
from ranvier.devices import warn_of_unusable_gpus
from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph
from ranvier.providers.base import Configurable, ExecutionProvider
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.preferred import preferred
from ranvier.runtime.program import provider_options
from ranvier.runtime.transfer import HOST, space_of


def effective(config: SessionConfig | ProviderConfig | None) -> SessionConfig:
    """A whole configuration as it is; a partial one, or none, laid over the other sources of options.

    Where nobody lists providers, those that the caller prefers come first.
    """
    found = config if isinstance(config, SessionConfig) else resolve(config=config).config
    first = preferred() if found.providers == ("auto",) else ()
    return found.updated(providers=(*first, "auto")) if first else found


def check_providers(config: SessionConfig, providers: Sequence[ExecutionProvider]) -> None:
    """Told before a model is loaded: options that a provider does not take, and a GPU that cannot be used."""
    _check_options(config.provider_options, {provider.name: provider for provider in providers})
    _check_memories(providers)
    if "auto" in config.providers:
        warn_of_unusable_gpus()


def _check_memories(providers: Sequence[ExecutionProvider]) -> None:
    """Two providers of one device would each order what it launches by itself, and nothing between them."""
    users: dict[str, str] = {}
    for provider in providers:
        space = space_of(provider)
        if space != HOST and users.setdefault(space, provider.name) != provider.name:
            raise InvalidConfig(f"providers {users[space]!r} and {provider.name!r} are both on {space}")


def _check_options(given: Mapping[str, Mapping[str, Any]], used: Mapping[str, ExecutionProvider]) -> None:
    for name, options in given.items():
        own = REGISTRY.resolve(name)
        if own != name:
            raise InvalidConfig(f"provider_options: {name!r} is another name of {own!r}; give its options under that")
        if name in used:
            provider_options(used[name], options)


def configured(provider: ExecutionProvider, config: SessionConfig) -> ExecutionProvider:
    """The provider as this session's options want it."""
    given = config.provider_options.get(provider.name)
    if given is None or not isinstance(provider, Configurable):
        return provider
    return provider.configure(provider_options(provider, given))


def apply_bounds(graph: Graph, bounds: Mapping[str, tuple[int, int | None]]) -> None:
    """Give the symbols of the inputs their bounds."""
    for name, (low, high) in bounds.items():
        symbol = graph.symbols.get(name)
        if symbol is None:
            raise InvalidConfig(f"symbol_bounds: the model has no dimension {name!r}{nearest(name, graph.symbols)}")
        symbol.lo, symbol.hi = low, high


__all__ = ["apply_bounds", "check_providers", "configured", "effective"]
