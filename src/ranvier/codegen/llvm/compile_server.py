"""A process that compiles: requests arrive on its input, machine code leaves on its output.

Run as a script by :mod:`ranvier.codegen.llvm.servers`, with the path of llvmlite's shared library. It imports little,
so that it is ready in 20 ms, and keeps nothing: killing it at any time is harmless. It ends when the other side closes
the connection, and by itself when nobody asked for anything for a while.
"""

from __future__ import annotations

import os
import select
import struct
import sys

IDLE_SECONDS = 60.0  # for the case that another process inherited the connection and holds it open
GREETING = b"RVCOMP01"  # sent once when ready; the first bytes of each reply
REQUEST = struct.Struct("<IIIII")  # what is wanted, bytes of triple, processor, features and text, which follow
REPLY = struct.Struct("<8sII")  # greeting, status, bytes that follow
DONE, REJECTED, FAILED = range(3)


def read(connection: int, size: int) -> bytes | None:
    """Exactly as many bytes; None at the end."""
    parts: list[bytes] = []
    while size:
        part = os.read(connection, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write(connection: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(connection, view) :]


def serve(library: str) -> None:
    """Answer until the connection, which is this process's input, is closed."""
    connection = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # whatever anybody prints must not get into a reply
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # at the end: nothing of the standard library is hidden
    import toolchain  # type: ignore[import-not-found]  # as a plain module: its package would bring all of Ranvier

    llvm = toolchain.Toolchain(library, alone=True)
    write(connection, GREETING)
    while select.select([connection], [], [], IDLE_SECONDS)[0]:
        head = read(connection, REQUEST.size)
        if head is None:
            return
        want, *sizes = REQUEST.unpack(head)
        body = read(connection, sum(sizes))
        if body is None:
            return
        parts: list[bytes] = []
        for size in sizes:
            parts.append(body[:size])
            body = body[size:]
        triple, cpu, features, text = parts
        try:
            status, found = DONE, llvm.compile(text, triple.decode(), cpu.decode(), features.decode(), want)
        except toolchain.Rejected as error:
            status, found = REJECTED, str(error).encode()
        except Exception as error:
            status, found = FAILED, f"{type(error).__name__}: {error}".encode()
        write(connection, REPLY.pack(GREETING, status, len(found)) + found)


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except OSError:  # the other side is gone
        os._exit(1)
    os._exit(0)  # LLVM would take milliseconds to tidy up
