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
from ranvier.runtime.worker.process import die_with_parent, private_stdout
from ranvier.runtime.worker.simulation import Simulated


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the parent
    die_with_parent()
    incoming = os.fdopen(os.dup(0), "rb", buffering=0)
    outgoing = os.fdopen(private_stdout(), "wb", buffering=0)
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


if __name__ == "__main__":
    main()
