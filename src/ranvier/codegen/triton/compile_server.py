"""A process in which Triton compiles: orders arrive on its input, machine code leaves on its output.

Run as a script by :mod:`ranvier.codegen.triton.images`, with the folders to import from. Triton holds the lock of the
interpreter for a good part of its time, so only other processes compile several kernels at once. torch is not imported
and no GPU is looked for: an order says for which kind it is. It talks as :mod:`ranvier.codegen.llvm.compile_server`
does, and ends as that one does.
"""

from __future__ import annotations

import json
import os
import re
import select
import struct
import sys
from typing import Any

SIZE = struct.Struct("<I")  # of the order that follows
INTERPRETED = "TRITON_INTERPRET"


def compiled(order: dict[str, Any]) -> bytes:
    """A line of JSON that says how the kernel is launched, and its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ranvier.codegen.triton.modules import function

    made = function(order["text"], order["name"])
    kinds = dict(zip(made.arg_names, order["kinds"], strict=True))
    fixed = {(position,): value for position, value in order["fixed"]}
    known = {(position,): [["tt.divisibility", 16]] for position in order["multiples"]}
    target = GPUTarget("cuda", order["capability"], 32)
    options = {"num_warps": order["warps"], "num_stages": order["stages"]}
    found = triton.compile(ASTSource(made, kinds, fixed, known), target=target, options=options)
    how = found.metadata
    scratch = getattr(how, "global_scratch_size", 0) + getattr(how, "profile_scratch_size", 0)
    special = how.num_ctas != 1 or scratch or how.launch_cooperative_grid or how.launch_pdl
    entry = re.search(rf"\.entry\s+{re.escape(how.name)}\s*\((.*?)\)", found.asm["ptx"], re.DOTALL)
    facts = {
        "name": how.name,
        "warps": how.num_warps,
        "shared": how.shared,
        "parameters": -1 if special or entry is None else entry[1].count(".param"),
    }
    return json.dumps(facts).encode() + b"\n" + bytes(found.asm["cubin"])


def _get_ready() -> None:
    """What every kernel needs, before anybody asks. Triton names what it keeps by a digest of its half a gigabyte: that
    takes each process as long as compiling a kernel; the library's size and time say the same."""
    import triton
    from triton.backends.nvidia import compiler  # noqa: F401
    from triton.compiler import code_generator  # noqa: F401
    from triton.runtime import cache

    import ranvier.codegen.triton.functions  # noqa: F401

    library = os.stat(str(sys.modules["triton._C.libtriton"].__file__))
    stamp = f"ranvier {triton.__version__} {library.st_size} {library.st_mtime_ns}"
    cache.triton_key = lambda: stamp


def serve() -> None:
    """Answer until the connection, which is this process's input, is closed."""
    from ranvier.codegen.llvm import compile_server as protocol

    connection = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # whatever anybody prints must not get into a reply
    os.environ.pop(INTERPRETED, None)  # of the process that asks: here everything is compiled
    _get_ready()
    protocol.write(connection, protocol.GREETING)
    while select.select([connection], [], [], protocol.IDLE_SECONDS)[0]:
        head = protocol.read(connection, SIZE.size)
        order = None if head is None else protocol.read(connection, *SIZE.unpack(head))
        if order is None:
            return
        try:
            status, found = protocol.DONE, compiled(json.loads(order))
        except Exception as error:
            status, found = protocol.REJECTED, f"{type(error).__name__}: {error}".encode()
        protocol.write(connection, protocol.REPLY.pack(protocol.GREETING, status, len(found)) + found)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # without this folder, whose modules have names of the standard library
    try:
        serve()
    except OSError:  # the other side is gone
        os._exit(1)
    os._exit(0)
