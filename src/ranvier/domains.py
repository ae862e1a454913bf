"""Names of sets of operators."""

from __future__ import annotations


def normal_domain(domain: str) -> str:
    """``ai.onnx`` is the long spelling of the empty domain."""
    return "" if domain == "ai.onnx" else domain
