"""Bytes looked up in a table of 256: what elementwise functions of codes become."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES
from ranvier.codegen.launch import Launch
from ranvier.codegen.storage import View
from ranvier.providers.cpu.lower.index import tries
from ranvier.providers.cpu.realise import Realiser


@tries("Gather")
def looked_up(n: NodeView, b: Definitions) -> bool:
    """A Gather of bytes from a table of 256 by positions that are bytes themselves, cast; False for other ones."""
    picked = n.known(1)
    if picked is not None and picked.size == 1:  # a view of one element
        return False
    if n.dtype(0) not in BYTES:  # asked first: the content of other tables may have to be copied to be seen
        return False
    table, cast_node = n.known(0), n.input(1).producer
    if table is None or table.shape != (256,):
        return False
    codes = cast_node.input(0) if cast_node is not None and cast_node.op == "Cast" and not cast_node.domain else None
    if codes is None or codes not in b.types or b.dtype(codes) not in BYTES or len(n.shape(1)) > 3:
        return False

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        from ranvier.codegen.llvm.integer import table_lookup  # and with it all kernels of codes: few models need them

        return table_lookup(views[0], views[1], outs[0])

    b.opaque([codes, n.input(0)], realise, [(n.dtype(0), n.out_shape())], [n.outputs[0]])
    return True
