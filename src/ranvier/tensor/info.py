"""What the array API lets a program ask a namespace about itself."""

from __future__ import annotations

from typing import Any

from ranvier.devices import CPU, Device
from ranvier.dtypes import DType
from ranvier.providers.registry import REGISTRY
from ranvier.tensor.types import COMPLEX, DEFAULT_COMPLEX, DEFAULT_FLOAT, DEFAULT_INT, SIGNED, UNSIGNED, isdtype

_TYPES = (DType.bool, *SIGNED, *UNSIGNED, DType.float32, DType.float64, *COMPLEX)  # those of the standard


class NamespaceInfo:
    """Capabilities, devices and element types."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 32}

    def default_device(self) -> Device:
        return CPU

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        return {
            "real floating": DEFAULT_FLOAT,
            "complex floating": DEFAULT_COMPLEX,
            "integral": DEFAULT_INT,
            "indexing": DEFAULT_INT,
        }

    def dtypes(self, *, device: Any = None, kind: str | tuple[str, ...] | None = None) -> dict[str, DType]:
        """The element types of a kind, by name."""
        return {t.name: t for t in _TYPES if kind is None or isdtype(t, kind)}

    def devices(self) -> list[Device]:
        return list(dict.fromkeys([CPU, *(REGISTRY.get(name).device for name in REGISTRY.available())]))


def namespace_info() -> NamespaceInfo:
    """What this namespace offers."""
    return NamespaceInfo()


_OF_TENSORS = True
