"""Causal attention with padding: by torch, or by a kernel that reads no keys behind a token, whichever is faster here.

The kernels are compiled while the rest of a part is prepared; which is the fastest is measured when it first runs
after that, and kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ranvier.codegen.phases import phase
from ranvier.codegen.triton import images, tune
from ranvier.codegen.triton.causal import TILES, Causal, CausalCall
from ranvier.logs import logger
from ranvier.providers.cuda.choosing import LIBRARY, agree, compile_later, decided, remember
from ranvier.providers.cuda.failures import is_lost
from ranvier.providers.cuda.library import torch

_SECONDS = 20.0  # to wait for a compiler


class CausalForms:
    """The ways to compute it for given sizes. Tensors are queries, keys, values [batch, heads, n, depth] and what is
    added to keys; results lie token by token."""

    def __init__(self, what: Causal, device: Any) -> None:
        self._what, self._device = what, device
        self._structure = f"causal {hashlib.sha256(repr(what).encode()).hexdigest()[:24]}"
        self._calls = {",".join(map(str, tile)): CausalCall(what, tile) for tile in TILES}
        self._waiting: list[Future[None]] | None = None
        self._chosen = decided(self._structure, device)

    def __call__(self, library: Callable[[], Any], tensors: Sequence[Any], *, decide: bool) -> Any:
        if self._chosen is None and not decide:
            self._begin()
        elif self._chosen is None:
            self._chosen = self._measured(library, tensors)
        own = self._calls.get(self._chosen or LIBRARY)
        return library() if own is None else self._run(own, tensors)

    def _begin(self) -> None:
        if self._waiting is None:
            images.prepare(len(self._calls))
            self._waiting = [compile_later(each.call, self._device) for each in self._calls.values()]

    def _run(self, own: CausalCall, tensors: Sequence[Any]) -> Any:
        batch, heads, n, depth = self._what.sizes
        out = torch.empty((batch, n, heads, depth), dtype=tensors[0].dtype, device=self._device)
        own.launch((*tensors, out))
        return out.transpose(1, 2)

    def _measured(self, library: Callable[[], Any], tensors: Sequence[Any]) -> str:
        with phase("compile"):
            for each in self._waiting or ():
                with contextlib.suppress(TimeoutError):
                    each.exception(_SECONDS)
        with phase("measure"):
            wanted = library().float()
            times = {LIBRARY: tune.on_gpu(library)}
            for name, own in self._calls.items():
                times[name] = self._time(name, functools.partial(self._run, own, tensors), wanted)
            best = min(times, key=lambda name: times[name])
            remember(self._structure, self._device, best, times)
        logger.debug("causal attention of %s: %s of %s", self._what.sizes, best, times)
        return best

    def _time(self, name: str, run: Callable[[], Any], wanted: Any) -> float:
        try:
            return tune.on_gpu(run) if agree(name, run(), wanted) else math.inf
        except Exception as error:
            if is_lost(error):
                raise
            logger.debug("no causal attention of %s here: %s", name, error)
            return math.inf


def causal_forms(q: Any, k: Any, v: Any, row: Any, scale: float) -> CausalForms | None:
    """Those for tensors like these; None where only torch can."""
    dtype = str(q.dtype).removeprefix("torch.")
    if q.ndim != 4 or not Causal.takes(dtype, q.shape[3]) or row.dtype != q.dtype or row.stride(3) != 1:
        return None
    if any(each.stride(3) != 1 for each in (q, k, v)):
        return None
    along = [tuple(map(int, each.stride()[:3])) for each in (q, k, v)]
    if any(q.shape[2] * t + q.shape[1] * h >= 1 << 31 for _, h, t in along):  # positions in a sequence have 32 bits
        return None
    step = row.stride(0) if row.shape[0] > 1 else 0
    what = Causal(dtype, tuple(q.shape), along[0], along[1], along[2], step, scale)  # type: ignore[arg-type]
    return _forms(what, q.device)


@functools.lru_cache(64)
def _forms(what: Causal, device: Any) -> CausalForms:
    return CausalForms(what, device)


__all__ = ["CausalForms", "causal_forms"]
