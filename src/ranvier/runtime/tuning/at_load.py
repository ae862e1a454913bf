"""Tuning while a session is made: option ``tune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.codegen.tuning import given
from ranvier.graph.types import TensorType
from ranvier.logs import warn_once
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.tuning.search import tune

if TYPE_CHECKING:
    from ranvier.runtime.session import Session


def tuned(session: Session, seconds: float) -> Compiled:
    """What the session shall run from now on: compiled with what so many seconds of trying found."""
    feed = _sample(session)
    if feed is None:
        name = session.config.name or session.graph.name
        reason = "sizes of its inputs are not known; 'ranvier tune MODEL --set DIM=SIZE' tunes for some"
        warn_once(f"tune {name}", f"model {name!r} is not tuned: {reason}")
        return session._compiled
    found = tune(session, feed, seconds=seconds)
    with given(found.table):
        made = session._compiled_for(session.providers)
        values, dims = session.signature.bind(session.signature.named(feed))
        session._plan(made, values, dims, session.output_names)
    session._compiled.close()
    return made


def _sample(session: Session) -> dict[str, Any] | None:
    """Values for all inputs; None where not all sizes are known. Whole numbers are 0 and 1, which index anything."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for name, kind in session.inputs.items():
        if not isinstance(kind, TensorType) or not kind.is_static or kind.dtype is None:
            return None
        dtype, shape = kind.dtype.numpy, tuple(d for d in kind.shape or () if isinstance(d, int))
        if dtype.kind == "O":
            return None
        made = rng.standard_normal(shape) if dtype.kind not in "iub" else rng.integers(0, 2, shape)
        found[name] = np.asarray(made).astype(dtype)
    return found
