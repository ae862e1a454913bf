"""Ranvier: load a model, optimize it, run it, and know where everything ran."""

from ranvier.runtime.session import Session, load

__all__ = ["Session", "load"]
