"""The options of the GPU provider."""

from __future__ import annotations

from typing import Any

from ranvier.errors import InvalidConfig, nearest
from ranvier.providers.cuda.place import TWIN
from ranvier.records import dataclass

PRECISIONS = ("auto", "f32", "tf32", "f16", "bf16")
_SWITCHES = {"auto": None, "on": True, "off": False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class CudaOptions:
    """``device``: the number of a GPU, or ``"cpu"`` for torch's CPU device, which is for tests.

    ``memory_limit``: bytes that may be taken from the device. ``precision``: what float32 products are computed in;
    ``auto`` does as the session says. ``cuda_graphs``: capture runs that repeat; by itself on a GPU. ``graphs_kept``:
    for how many different sizes of inputs runs are kept. ``triton``: generated kernels in place of runs of small
    operators; by itself on a GPU.
    """

    device: int | str = 0
    memory_limit: int | None = None
    precision: str = "auto"
    cuda_graphs: bool | None = None
    graphs_kept: int = 8
    triton: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _device(self.device))
        for name in ("cuda_graphs", "triton"):
            object.__setattr__(self, name, _switch(name, getattr(self, name)))
        for name in ("memory_limit", "graphs_kept"):
            value = _number(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is None and name == "memory_limit":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidConfig(f"CudaOptions: {name} must be a whole number of 1 or more, got {value!r}")
        if self.precision not in PRECISIONS:
            near = nearest(str(self.precision), PRECISIONS)
            raise InvalidConfig(f"CudaOptions: precision cannot be {self.precision!r}{near}")


def _device(given: Any) -> int | str:
    text = str(given).strip().lower().removeprefix("cuda:")
    if text == TWIN:
        return TWIN
    if isinstance(given, bool) or not (text.isascii() and text.isdigit()):
        raise InvalidConfig(f"CudaOptions: device must be the number of a GPU or 'cpu', got {given!r}")
    return int(text)


def _switch(name: str, given: Any) -> bool | None:
    if given is None or isinstance(given, bool):
        return given
    text = str(given).strip().lower()
    if text not in _SWITCHES:
        raise InvalidConfig(f"CudaOptions: {name} must be true, false or auto, got {given!r}")
    return _SWITCHES[text]


def _number(given: Any) -> Any:
    text = given.strip() if isinstance(given, str) else ""
    return int(text) if text.isascii() and text.isdigit() else given


__all__ = ["PRECISIONS", "CudaOptions"]
