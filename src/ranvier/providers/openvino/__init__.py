"""The provider ``openvino``, and what it must not be given."""

from __future__ import annotations

from ranvier.providers.openvino.provider import OpenVinoOptions, OpenVinoProvider

__all__ = ["OpenVinoOptions", "OpenVinoProvider"]
