"""Depthwise convolution: every output channel reads one input channel, and vectors run along the channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.depthwise_any import Depthwise, Structure
from ranvier.codegen.llvm.conv.depthwise_flat import (
    HELD_TAPS,
    KERNEL_TAPS,
    LINE,
    MOST_TAPS,
    FlatDepthwise,
    takes_turns,
)
from ranvier.codegen.llvm.conv.epilogues import Tail
from ranvier.codegen.llvm.conv.shape import (
    ConvShape,
    Numbering,
    Packed,
    Pixels,
    lying,
    packed_constant,
    require_channels_last,
    sums_of,
)
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_UNROLLED = 9  # taps of a row, at most, that are written out
_CHECKED = 5  # taps of a row: with fewer, checking columns costs nothing where vectors are long
_LEAST = 64 << 10  # bytes that are worth a tile of their own
_BLOCK = 128 << 10  # bytes of input under a block: they come from far once, whatever the order within the block
_L1 = 24 << 10  # bytes of input rows that should stay in the first cache while a block of channels is worked on


def takes_halves(shape: ConvShape, isa: Isa) -> bool:
    """Whether float16 arithmetic sums up the window: there are not more products than it sums up elsewhere."""
    few = shape.taps <= MOST_TAPS and shape.kernel[2] <= _UNROLLED and shape.cout == shape.cin
    return few and shape.is_flat and multiplies_halves(isa) and not isa.masks


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, dtype: DType) -> Packed:
    """[taps][channels], channels padded to whole vectors. float16 is for its arithmetic."""
    lanes = isa.lanes(dtype.numpy.itemsize)
    padded = -(-shape.cout // lanes) * lanes
    found = np.zeros((shape.taps, padded), dtype.numpy)
    found[:, : shape.cout] = w.reshape(shape.cout, shape.taps).T
    return packed_constant("depthwise halves" if dtype is DType.float16 else "depthwise", found, dtype, padded)


def depthwise(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None = None,
) -> list[Launch]:
    require_channels_last(x, "the input")
    require_channels_last(out, "the output")
    if shape.is_column:
        turned = None if numbering is None else Numbering(numbering.d, numbering.w, numbering.h, numbering.first)
        return depthwise(lying(x), packed, lying(out), shape.as_row(), isa, epilogue, threads, turned)
    halves = packed.dtype is DType.float16
    tail = Tail.of(epilogue, sums_of(packed.dtype))
    item = x.dtype.numpy.itemsize
    lanes = isa.lanes(packed.dtype.numpy.itemsize)
    kernel, stride, dilation = shape.kernel[2], shape.strides[2], shape.dilations[2]
    multiplier = shape.cout // shape.cin
    unrolled = kernel if kernel <= _UNROLLED else 0
    rows = _rows_inside(shape)
    few = rows * kernel <= MOST_TAPS and shape.taps <= KERNEL_TAPS
    high = rows if shape.is_flat and unrolled and few and multiplier == 1 else 0
    low = 0 < high < shape.kernel[1]
    pairs = x.dtype is DType.bfloat16 and isa.has("avx512bf16") and multiplier == 1 and shape.cout >= 2 * lanes
    doubled = takes_turns(isa) and 0 < high * kernel <= HELD_TAPS and stride == 1 and shape.cout >= 2 * lanes
    two = pairs or doubled
    pixels = _pair_group(shape.out[2], rows * kernel) if two else _group(shape.out[2], kernel, isa)
    width = (pixels - 1) * stride + (kernel - 1) * dilation + 1
    reach = (kernel - 1) * dilation
    behind = (shape.out[2] - 1) * stride - shape.begin[2] + reach - (shape.size[2] - 1)
    whole = high > 0 and shape.out[2] % pixels == 0 and 0 <= shape.begin[2] <= reach and behind <= reach
    checks = kernel >= _CHECKED or not isa.masks
    inner = not whole or (checks and 2 * _groups_inside(shape, pixels, width) >= shape.out[2] // pixels)
    rest = not two or shape.cout % (2 * lanes) > 0
    window = high, unrolled, stride, dilation, low
    structure = Structure(*window, pixels, whole, inner, multiplier > 1, pairs, rest, doubled, halves)
    writer = FlatDepthwise if high else Depthwise

    def emit(module: Module, symbol: str, target: Isa) -> None:
        writer(module, symbol, target, x.dtype, out.dtype, structure, tail).function()

    spec = KernelSpec(
        f"depthwise {'halves' if halves else x.dtype} {high or 'any'}x{unrolled or 'any'} stride {stride}",
        ("depthwise", 7, x.dtype.name, out.dtype.name, structure.key, tail.key),
        emit,
    )
    # tall blocks: rows that two outputs share are loaded once, and a vector of channels is set up once
    planes = shape.n * shape.out[0]
    wanted = 1 if threads == 1 else max(1, min(6 * threads, int((x.nbytes + out.nbytes) / _LEAST)))
    line = shape.strides[1] * shape.size[2] * shape.cin * item
    block = min(-(-shape.out[1] // min(shape.out[1], -(-wanted // planes))), max(2, _BLOCK // line))
    blocks = -(-shape.out[1] // block)
    cached = shape.kernel[1] * max(width, shape.size[2]) * item
    wide = 2 * lanes if pairs else LINE // item if high and takes_turns(isa) else lanes
    channel_block = max(1, _L1 // cached // wide) * wide
    dims = (
        *shape.size,
        *shape.out,
        shape.cout,
        packed.block,
        *shape.kernel[:2],
        *shape.strides[:2],
        *shape.dilations[:2],
        *shape.begin,
        *Pixels.of(x).numbers,
        *Pixels.of(out).numbers,
        *(block, blocks, channel_block, multiplier, kernel),
        *(numbering or Numbering.plain(shape.out)).fields.values(),
        *tail.dims,
    )
    return [
        Launch(
            spec,
            (At(x.storage, x.offset * item), At(packed.storage), At.of(out), *tail.buffers),
            dims,
            tiles=shape.n * shape.out[0] * blocks,
            writes=(out.storage,),
            flops=shape.flops,
            traffic=float(x.nbytes + out.nbytes),
            label="depthwise",
        )
    ]


def _groups_inside(shape: ConvShape, pixels: int, width: int) -> int:
    """Groups of pixels whose columns, so many, all lie inside the image."""
    step = pixels * shape.strides[2]
    first = -(-shape.begin[2] // step)
    last = (shape.size[2] - width + shape.begin[2]) // step
    return max(0, last - first + 1)


def _rows_inside(shape: ConvShape) -> int:
    """Rows of a window that can lie inside the image at once: of a low one, fewer than the window has."""
    return min(shape.kernel[1], -(-shape.size[1] // shape.dilations[1]))


def _pair_group(width: int, taps: int) -> int:
    """The same with two vectors of channels: sums for fewer pixels fit beside the weights."""
    few = range(3, 6) if taps <= HELD_TAPS else range(4, 7)
    return min(few, key=lambda p: (-(-width // p) * p, -p))


def _group(width: int, kernel: int, isa: Isa) -> int:
    """Output pixels per body: the number that wastes least at the end of a row and still fits the registers."""
    most = 8 if kernel <= 5 or isa.registers > 16 else 6
    return min(range(4, most + 1), key=lambda p: (-(-width // p) * p, -p))
