"""The provider ``sim``: an accelerator made of an ordinary process, for trying what a machine does not have.

It computes with the reference, so its results are right; its speed, memory and faults are options, so placement,
transfers and fallback can be tested anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from ranvier.devices import Device
from ranvier.errors import InvalidConfig, ProviderUnavailable, nearest
from ranvier.graph.ir import Node
from ranvier.providers.base import DeclaredSpeed
from ranvier.providers.distant.channel import PipeChannel
from ranvier.providers.distant.client import DistantProvider
from ranvier.providers.distant.wire import Buffer, Message
from ranvier.providers.sim.faults import parse_faults
from ranvier.records import dataclass

WORKER = "ranvier.runtime.worker.pipe"
_ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # others have work too
_PATIENCE = 0.2  # seconds a worker has to end by itself


@dataclass(frozen=True)
class SimOptions:
    """The accelerator. ``ops``: the operators it has, by commas; empty: all. ``faults``: see docs/providers.md."""

    gflops: float = 50.0
    bandwidth: float = 8e9  # bytes per second between its memory and ours
    latency: float = 20e-6  # seconds per message
    memory: int = 1 << 30
    ops: str = ""
    faults: str = ""
    timeout: float = 30.0  # seconds that an answer may take before the device counts as hung
    index: int = 0

    def __post_init__(self) -> None:
        for name in ("gflops", "bandwidth", "memory", "timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidConfig(f"SimOptions: {name} must be a positive number, got {value!r}")
        if not isinstance(self.latency, int | float) or not self.latency >= 0:
            raise InvalidConfig(f"SimOptions: latency must be 0 or more seconds, got {self.latency!r}")
        if not isinstance(self.index, int) or self.index < 0:
            raise InvalidConfig(f"SimOptions: index must be 0 or more, got {self.index!r}")
        parse_faults(self.faults)
        if not isinstance(self.ops, str):
            raise InvalidConfig(f"SimOptions: ops must be names by commas, got {self.ops!r}")
        _check_ops(listed(self.ops))


def listed(ops: str) -> frozenset[str]:
    return frozenset(op.strip() for op in ops.split(",") if op.strip())


def _check_ops(ops: frozenset[str]) -> None:
    if not ops:
        return
    from ranvier.ops import registry  # which takes long to import, and mostly nobody limits the operators

    known = {definition.name for definition in registry.declared()}
    for op in sorted(ops - known):
        raise InvalidConfig(f"SimOptions: ops: unknown operator {op!r}{nearest(op, known)}")


class SimProvider(DistantProvider):
    name: ClassVar[str] = "sim"
    Options: ClassVar[type] = SimOptions
    options: SimOptions

    def __init__(self, options: SimOptions | None = None) -> None:
        super().__init__(options or SimOptions())
        self._ops = listed(self.options.ops)

    def configure(self, options: Any) -> SimProvider:
        return SimProvider(options)

    def declared_speed(self) -> DeclaredSpeed:
        own = self.options
        return DeclaredSpeed(own.gflops * 1e9, own.bandwidth, own.latency, float(own.memory))

    def _device(self) -> Device:
        return Device("sim", self.options.index)

    def _timeout(self) -> float:
        return self.options.timeout

    def _refuses(self, node: Node) -> str | None:
        if self._ops and node.op not in self._ops:
            return "this accelerator does not have the operator"
        return None

    def _open(self) -> _ProcessChannel:
        return _ProcessChannel(json.dumps(asdict(self.options)))


class _ProcessChannel:
    """A worker process and the pipes to it; the process ends with the channel."""

    def __init__(self, options: str) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, **_ONE_CORE},
            )
        except OSError as error:
            raise ProviderUnavailable("sim", f"its process cannot be started ({error})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = PipeChannel(self._process.stdout, self._process.stdin)  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, pieces: Sequence[Buffer]) -> None:
        self._pipes.send(pieces)

    def receive(self) -> Message:
        return self._pipes.receive()

    def close(self) -> None:
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()  # which is how it learns that it is no longer needed
        try:
            process.wait(_PATIENCE if process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._pipes.close()
