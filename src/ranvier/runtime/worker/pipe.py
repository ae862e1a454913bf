"""``python -m ranvier.runtime.worker.pipe``: a device behind a pair of pipes, for the provider ``sim``.

Its options come as one argument of JSON. It ends with its parent: when the pipe does, or, on Linux, by signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ranvier.errors import RanvierError
from ranvier.providers.distant.channel import PipeChannel
from ranvier.providers.sim.faults import parse_faults
from ranvier.runtime.worker.device import DeviceServer
from ranvier.runtime.worker.simulation import Simulated


def main() -> None:
    _settle()
    incoming = os.fdopen(os.dup(0), "rb", buffering=0)
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    options = json.loads(sys.argv[1])
    server = DeviceServer(
        ("reference",),
        memory_limit=options["memory"],
        conduct=Simulated(
            gflops=options["gflops"],
            bandwidth=options["bandwidth"],
            latency=options["latency"],
            faults=parse_faults(options["faults"]),
        ),
    )
    channel = PipeChannel(incoming, outgoing)
    while True:
        try:
            channel.send(server.handle(channel.receive()))
        except (EOFError, OSError, RanvierError):
            break
    server.close()


def _settle() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the parent
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
