"""Convolutions of bfloat16 with float32 sums: packed weights, blocks of work, and the launch that runs them.

``x`` is bfloat16 or float32 (rounded as it is copied), the output either. Products of denormals are zero, as the
instructions have it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.bfloat_copy import Structure
from ranvier.codegen.llvm.conv.bfloat_driver import FIELDS, BfloatDriver
from ranvier.codegen.llvm.conv.bfloat_finish import finish_spec
from ranvier.codegen.llvm.conv.bfloat_micro import has_tiles, micro_spec, suits
from ranvier.codegen.llvm.conv.bfloat_plan import LINE, TABLE_AT, Plan, depth_of, plan_of
from ranvier.codegen.llvm.conv.epilogues import Tail
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, Pixels, packed_constant, require_channels_last
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType

_COLUMNS = 16  # of a vector of sums
_SPEED = 20.0  # times that of float32 work: what a launch's work counts as for scheduling


def kind_of(shape: ConvShape, isa: Isa) -> str | None:
    """The kind of packing for a shape, or None where there is no bfloat16 kernel for it."""
    if not suits(isa) or not shape.is_flat or shape.is_depthwise:
        return None
    return f"bfloat {depth_of(shape).kind}"


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape) -> Packed:
    """[group][panel][pair][column][2]: pairs along (tap, channel), panels of two vectors of columns, the last of one
    where that is all there is."""
    depth = depth_of(shape)
    taps = w.reshape(shape.group, shape.width, shape.depth, shape.taps).transpose(0, 3, 2, 1)
    room = depth.pixel
    if depth.kind == "gathered":
        taps = taps.reshape(shape.group, 1, shape.taps * shape.depth, shape.width)
        room = depth.elements
    vectors = -(-shape.width // _COLUMNS)
    bits = np.zeros((shape.group, taps.shape[1], room, vectors * _COLUMNS), np.uint16)
    rounded = np.ascontiguousarray(taps).astype(DType.bfloat16.numpy)
    bits[:, :, : taps.shape[2], : shape.width] = rounded.view(np.uint16)
    pairs = bits.reshape(shape.group, -1, 2, vectors, _COLUMNS).transpose(0, 1, 3, 4, 2)
    panels = [np.ascontiguousarray(pairs[:, :, v : v + 2]).reshape(shape.group, -1) for v in range(0, vectors, 2)]
    packed = packed_empty((shape.group, sum(p.shape[1] for p in panels)), np.dtype(np.uint16))
    np.concatenate(panels, axis=1, out=packed)
    return packed_constant(f"bfloat {depth.kind}", packed, DType.bfloat16)


def bfloat_conv(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None = None,
) -> list[Launch]:
    require_channels_last(out, "the output")
    flops, traffic = shape.flops, float(x.nbytes + out.nbytes + packed.storage.nbytes)
    numbering = numbering or Numbering.plain(shape.out)
    plan, x, shape = plan_of(x, out, shape, numbering, packed.storage.nbytes, threads)
    if not plan.planes:
        require_channels_last(x, "the input")
    structure = Structure(plan.mode, x.dtype, out.dtype, plan.planes, plan.depth.pixel if plan.planes else 0)
    tail = Tail.of(epilogue, DType.float32)

    def emit(module: Module, symbol: str, target: Isa) -> None:
        BfloatDriver(module, symbol, target, structure).function()

    spec = KernelSpec(f"conv bfloat16 {plan.mode}", ("bfloat conv", 1, structure.key), emit)
    numbers = _numbers(x, out, shape, plan, numbering)
    vectors = -(-shape.width // _COLUMNS)
    short = plan.depth.kind == "strip"
    panel_bytes = numbers["panel_bytes"]
    wide = Code(micro_spec(isa, 2 if vectors > 1 else 1, short=short, panel_bytes=panel_bytes))
    return [
        Launch(
            spec,
            (
                At.of(x),
                At(packed.storage),
                At.of(out),
                At(_offsets(plan.offsets)),
                wide,
                Code(micro_spec(isa, 1, short=short, panel_bytes=panel_bytes)) if vectors % 2 else wide,
                Code(finish_spec(tail, out.dtype, single=shape.width == 1)),
                *tail.buffers,
            ),
            (*(numbers[name] for name in FIELDS), *tail.dims),
            tiles=shape.n * plan.pixel_blocks * shape.group * plan.panel_blocks,
            writes=(out.storage,),
            scratch=plan.scratch,
            flops=flops / (_SPEED if has_tiles(isa) else 2.0),
            traffic=traffic,
            label="conv bfloat16",
        )
    ]


@functools.lru_cache(1024)
def _offsets(values: tuple[int, ...]) -> Storage:
    return Storage.constant(np.array(values, np.int64), "offsets of taps")


def _numbers(x: View, out: View, shape: ConvShape, plan: Plan, numbering: Numbering) -> dict[str, int]:
    place, target = Pixels.of(x), Pixels.of(out)
    vectors = -(-shape.width // _COLUMNS)
    panels = -(-vectors // 2)
    depth = plan.depth.elements
    numbers = {
        "inner": shape.n * plan.pixel_blocks if plan.columns_outside else shape.group * plan.panel_blocks,
        "columns_outside": int(plan.columns_outside),
        "pixel_blocks": plan.pixel_blocks,
        "panel_blocks": plan.panel_blocks,
        "panels": panels,
        "block_panels": plan.block_panels,
        "panel_bytes": depth * 2 * _COLUMNS * 2,
        "group_bytes": depth * 2 * _COLUMNS * vectors,
        "panel_columns": 2 * _COLUMNS,
        "narrow_last": vectors % 2,
        "width": shape.width,
        "depth": shape.depth,
        "groups": plan.depth.segment // 2,
        "segments": plan.depth.segments,
        "rows": plan.rows,
        "tile_line": 2 * LINE,
        **dict(zip(("yn", "yh", "yw"), (target.n, target.h, target.w))),
        **dict(zip(("qh", "qw", "q0"), (numbering.h, numbering.w, numbering.first))),
        "xn": place.n,
        "xh": place.h,
        "xw": place.w,
        "xc": x.strides[1] if plan.planes else 1,
        **dict(zip(("h", "w"), shape.size[1:])),
        **dict(zip(("kh", "kw"), shape.kernel[1:])),
        **dict(zip(("sh", "sw"), shape.strides[1:])),
        **dict(zip(("dh", "dw"), shape.dilations[1:])),
        **dict(zip(("ph", "pw"), shape.begin[1:])),
        "table_at": TABLE_AT,
        **plan.fields,
    }
    return numbers
