"""Work done once per node: what a body derives from its attributes.

An attribute with a hundred thousand numbers (the nodes of a forest, the words of a vocabulary) costs more to turn into
arrays than the call itself. A node hands the same attribute objects to its body at every call, so results are
remembered by the *identity* of those objects; comparing or hashing the contents would cost as much as the work saved.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

KEPT = 16  # results per function; each keeps the attributes it came from alive

P = ParamSpec("P")
T = TypeVar("T")


def prepared(build: Callable[P, T]) -> Callable[P, T]:
    """Remember the results of ``build`` for its latest arguments, told apart by identity.

    Arguments must not change afterwards. Lists invite changes, so a call with one is never remembered.
    """
    kept: OrderedDict[tuple[int, ...], tuple[Any, T]] = OrderedDict()
    lock = threading.Lock()

    @wraps(build)
    def lookup(*args: P.args, **kwargs: P.kwargs) -> T:
        values = (*args, *kwargs.values())
        if any(type(value) is list for value in values):
            return build(*args, **kwargs)
        key = (*map(id, values), *map(hash, kwargs))
        with lock:
            found = kept.get(key)
            if found is not None:
                kept.move_to_end(key)
                return found[1]
        result = build(*args, **kwargs)
        with lock:
            kept[key] = (values, result)  # holding the arguments keeps their identities from being reused
            if len(kept) > KEPT:
                kept.popitem(last=False)
        return result

    return lookup
