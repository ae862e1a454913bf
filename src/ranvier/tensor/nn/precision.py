"""Mixed precision: inside ``autocast`` products and convolutions run in a smaller type, what loses by it in float32.

Weights stay as they are; casts are part of the graph, so gradients come back in the weights' own type.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.manipulate import astype
from ranvier.tensor.state import Setting
from ranvier.tensor.tracing import now

_NAMES = {"bf16": DType.bfloat16, "fp16": DType.float16, "f32": DType.float32}
_SMALL = (DType.bfloat16, DType.float16)


class _Active(threading.local):
    def __init__(self) -> None:
        self.outside: Setting[DType | None] = Setting(None)  # what a function that is traced finds
        self.inside: list[tuple[Any, DType | None]] = []  # what it has set itself, with the tracing of it


_active = _Active()


def autocast_dtype() -> DType | None:
    """The type products run in just now; None outside ``autocast``."""
    if now.tracing is not None and _active.inside and _active.inside[-1][0] is now.tracing:
        return _active.inside[-1][1]
    return _active.outside.value


class autocast:
    """``with autocast("bf16"):`` or ``@autocast("fp16")``: the type in which products and convolutions run inside."""

    def __init__(self, dtype: Any = "bf16", enabled: bool = True) -> None:
        found = _NAMES[dtype] if isinstance(dtype, str) and dtype in _NAMES else dtypes.of(dtype)
        if found not in (*_SMALL, DType.float32):
            raise InvalidInput(f"autocast is to bfloat16 or float16, not {found}")
        self.dtype = found if enabled and found is not DType.float32 else None
        self._before: list[tuple[bool, DType | None]] = []

    def __enter__(self) -> autocast:
        if now.tracing is not None:
            self._before.append((True, None))
            _active.inside.append((now.tracing, self.dtype))
        else:
            self._before.append((False, _active.outside.value))
            _active.outside.value = self.dtype
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inside, before = self._before.pop()
        if inside:
            _active.inside.pop()
        else:
            _active.outside.value = before

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.dtype or "f32"):
                return function(*args, **kwargs)

        return inside


def lowered(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands of a product, in the type that is asked for just now."""
    kind = autocast_dtype()
    if kind is None:
        return operands
    return tuple(astype(x, kind) if x.dtype in (DType.float32, *_SMALL) else x for x in operands)


def raised(x: Tensor) -> Tensor:
    """An operand of something that loses digits in a small type."""
    return x if x.dtype not in _SMALL or autocast_dtype() is None else astype(x, DType.float32)


_OF_TENSORS = True
