"""Which form of a product is the fastest on this GPU: measured when one of its kind first runs, and kept.

Generated kernels are compiled in threads as soon as a part is known to need them, while it runs by torch for the first
time. Measuring ends after some seconds for a part; what comes later has the library's form.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ranvier.codegen.phases import phase
from ranvier.codegen.triton import images, tune
from ranvier.codegen.triton.library import Call, Printed
from ranvier.logs import logger
from ranvier.providers.cuda.failures import is_lost
from ranvier.providers.cuda.forms import LIBRARY, Form, Work
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.place import Gpu, Place

_SECONDS = 6.0  # of measuring and of waiting for compilers for a part: tens of products, each some milliseconds
_WAYS = 4  # of a library's own that it measures
_TOLERANCE = {"float16": 1e-2, "bfloat16": 6e-2}  # of the largest element; the order of sums differs


class Chooser:
    """Decides once for products that are alike. ``prefer`` takes the first form whose name starts so, for tests."""

    def __init__(self, place: Place, prefer: str | None = None) -> None:
        self._place = place
        self._prefer = prefer
        self._measures = isinstance(place, Gpu) and prefer is None
        self._chosen: dict[str, str] = {}  # names of forms by structure
        self._expected: dict[str, list[Form]] = {}  # what may be chosen, by structure
        self._waiting: dict[str, list[Future[None]]] = {}
        self._pending: list[Printed] = []
        self._spent = 0.0
        self._lock = threading.RLock()

    def known(self, work: Work) -> Form | None:
        """The form of work whose like was decided before, here or by an earlier process."""
        candidates = work.candidates()
        if not self._measures:
            return candidates[self._first(list(candidates))]()
        structure = work.structure()
        name = self._chosen.get(structure) or decided(structure, self._place.device)
        return candidates[name]() if name in candidates else None

    def compiles(self, printed: Printed) -> None:
        """Have kernels compiled by the time that they are launched."""
        with self._lock:
            self._pending.append(printed)

    def expect(self, work: Work) -> None:
        """The same for all that may be chosen."""
        structure = work.structure()
        with self._lock:
            if structure not in self._expected:
                self._expected[structure] = [make() for make in work.candidates().values()]

    def start(self) -> None:
        """Begin to compile. Not before a part is ready: the compilers' threads would be in the way."""
        if not isinstance(self._place, Gpu):
            return
        with self._lock:
            needed = [call for printed in self._pending for call in printed.calls]
            tried = {
                structure: [call for form in forms if form.printed is not None for call in form.printed.calls]
                for structure, forms in self._expected.items()
                if structure not in self._waiting and structure not in self._chosen
            }
            missing = [c for calls in (needed, *tried.values()) for c in calls if not c.is_compiled()]
            images.prepare(len(missing))
            for call in needed:
                compile_later(call, self._place.device)
            for structure, calls in tried.items():
                self._waiting[structure] = [compile_later(call, self._place.device) for call in calls]
            self._pending.clear()

    def choose(self, work: Work, run: Callable[[Form], Any]) -> Form:
        """Measure the forms of a product on a run's own tensors. ``run`` returns the result; one that is not what the
        library makes of it is never chosen."""
        structure = work.structure()
        with self._lock, phase("measure"):
            known = self.known(work)
            if known is not None:
                return known
            forms = {name: make() for name, make in work.candidates().items()}
            start = time.monotonic()
            first = forms[self._first(list(forms))]
            if self._spent > _SECONDS:
                return first
            self._wait(structure, start)
            with _searching():
                wanted = run(forms[LIBRARY]).float()
            times = {name: self._time(form, run, wanted) for name, form in forms.items()}
            self._expected.pop(structure, None)
            self._spent += time.monotonic() - start
            best = min(times, key=lambda name: times[name])
            if times[best] == math.inf:
                return first
            self._chosen[structure] = best
            remember(structure, self._place.device, best, times)
            logger.debug("%s %s: %s of %s", work.sizes(), structure, best, times)
            return forms[best]

    def _wait(self, structure: str, start: float) -> None:
        """For the compilers, as long as there is time."""
        for each in self._waiting.pop(structure, []):
            with phase("compile"), contextlib.suppress(TimeoutError):
                each.exception(max(0.1, _SECONDS - self._spent - (time.monotonic() - start)))

    def _time(self, form: Form, run: Callable[[Form], Any], wanted: Any) -> float:
        try:
            # where a form reads memory that nobody wrote, this is what it finds there
            torch.full(wanted.shape, math.nan, dtype=torch.float16, device=wanted.device)
            return tune.on_gpu(lambda: run(form)) if agree(form.name, run(form), wanted) else math.inf
        except Exception as error:
            if is_lost(error):
                raise
            logger.debug("no %s here: %s", form.name, error)
            return math.inf

    def _first(self, names: list[str]) -> str:
        if self._prefer is not None:
            return next((name for name in names if name.startswith(self._prefer)), names[0])
        return LIBRARY if self._measures else names[0]


def agree(name: str, found: Any, wanted: Any) -> bool:
    """Whether a form gives what the library gave."""
    off = float((found.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if off <= _TOLERANCE[str(found.dtype).removeprefix("torch.")]:
        return True
    logger.info("%s is off by %g and is not used", name, off)
    return False


def decided(structure: str, device: Any) -> str | None:
    """What was found to be the fastest before, by this process or an earlier one."""
    return _stored(_gpu(device)).get(structure)


def remember(structure: str, device: Any, best: str, times: Mapping[str, float]) -> None:
    from ranvier.codegen import tuning_store

    gain = times[LIBRARY] / times[best] if times[LIBRARY] < math.inf else 1.0
    tuning_store.save(_table(_gpu(device)), 1, {structure: tuning_store.Entry(best, gain, times[best])})
    _stored(_gpu(device))[structure] = best


def _gpu(device: Any) -> str:
    return str(torch.cuda.get_device_name(device))


def _table(gpu: str) -> str:
    return f"products {gpu}"


@functools.cache
def _stored(device: str) -> dict[str, str]:
    from ranvier.codegen import tuning_store

    return {key: entry.chosen for key, entry in tuning_store.entries(_table(device), 1).items()}


@contextlib.contextmanager
def _searching() -> Iterator[None]:
    """cuDNN measures some of its own ways in between, and keeps what it finds for later calls of the same sizes."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, _WAYS
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(16, (os.cpu_count() or 2) - 1)), "ranvier-triton")


_begun: dict[Any, Future[None]] = {}  # by what Triton compiles apart


def compile_later(call: Call, device: Any) -> Future[None]:
    """Compile a kernel in a thread; one that cannot be compiled says so when it is launched."""

    def compile_now() -> None:
        with torch.cuda.device(device):
            call.compile()

    source = call.source
    numbers = tuple((n == 1, n % 16 == 0, n >= 1 << 31) for n in source.numbers)
    key = (str(device), source.text, source.constants, source.warps, source.stages, numbers)
    found = _begun.get(key)
    if found is None:
        found = _begun[key] = _compilers().submit(compile_now)
    return found


__all__ = ["LIBRARY", "Chooser", "agree", "compile_later", "decided", "remember"]
