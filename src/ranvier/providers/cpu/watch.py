"""Deadlines and cancellations for native code, which cannot look at them itself."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import numpy as np

from ranvier.ops.pulse import Check

_PERIOD = 0.005  # seconds between two looks


class Watch:
    """While the block runs, another thread calls ``check``; when that raises, the flag native code reads between its
    steps is set, and the error is raised at the end of the block."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._flag: np.ndarray[Any, Any] = np.zeros(1, np.int32)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._look, name="ranvier-watch", daemon=True)

    @property
    def address(self) -> int:
        return int(self._flag.ctypes.data)

    def _look(self) -> None:
        while not self._done.wait(_PERIOD):
            try:
                self._check("generated code")
            except BaseException as error:
                self._error = error
                self._flag[0] = 1
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error
