"""Nested dicts, lists and tuples of tensors, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ranvier.errors import InvalidInput


def leaves(tree: Any) -> Iterator[Any]:
    """What is in a tree, in a fixed order: that of the keys of dicts, of the elements of lists and tuples."""
    if isinstance(tree, dict):
        for key in tree:
            yield from leaves(tree[key])
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from leaves(each)
    elif tree is not None:
        yield tree


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with a function of each leaf."""
    if isinstance(tree, dict):
        return type(tree)((key, mapped(function, each)) for key, each in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, each) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, each) for each in tree)
    return None if tree is None else function(tree)


def filled(tree: Any, values: list[Any]) -> Any:
    """The same tree with these leaves, in order."""
    rest = iter(values)
    found = mapped(lambda _: next(rest), tree)
    if next(rest, None) is not None:
        raise InvalidInput("more values than leaves")
    return found


_OF_TENSORS = True
