"""Measuring which of several ways to compute a shape is the fastest here; see docs/tuning.md."""

from __future__ import annotations

from ranvier.runtime.tuning.search import DEFAULT_SECONDS, Outcome, Tuned, tune

__all__ = ["DEFAULT_SECONDS", "Outcome", "Tuned", "tune"]
