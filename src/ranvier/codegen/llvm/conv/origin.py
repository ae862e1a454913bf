"""What a convolution's launch was made from, so that it can be made again for a part of the image."""

from __future__ import annotations

from ranvier.codegen.llvm.conv.shape import ConvShape, Packed
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.records import dataclass


@dataclass(frozen=True)
class Origin:
    """The operands of ``front.conv``."""

    x: View
    packed: Packed
    out: View
    shape: ConvShape
    epilogue: Epilogue | None


def origin(x: View, packed: Packed, out: View, shape: ConvShape, epilogue: Epilogue | None) -> Origin | None:
    """None where bands make no sense: volumes, and algorithms that work on squares."""
    if x.rank != 4 or not shape.is_flat or packed.kind.startswith("winograd"):
        return None
    return Origin(x, packed, out, shape, epilogue)
