"""Panels of weights that are a tensor of the graph, made by a kernel at every run.

Vectors run along the output channels, as in the panels. In the weights these lie apart, so lanes are gathered; a tile
of the launch takes some input channels of a panel, all taps of which are near each other in memory. For Winograd's
algorithm the nine taps of a vector of kernels are transformed in registers.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.conv.epilogues import Fields, below
from ranvier.codegen.llvm.conv.plan import Panels
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.conv.transforms import both_ways, filter_values
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from ranvier.records import dataclass

_FIELDS = (
    *("panels", "blocks", "channels", "panel", "rest", "depth", "width", "kd", "kh", "kw", "group_step"),
    *("out_step", "in_step", "d_step", "h_step", "w_step", "group_elements", "panel_elements"),
)
_NEAR = 64 << 10  # bytes of panels that a tile writes, about


@dataclass(frozen=True)
class Source:
    """Where weights lie, by (group, output channel, input channel, depth, height, width); strides in elements."""

    at: At
    dtype: DType
    group: int
    out: int
    channel: int
    taps: tuple[int, int, int]
    zero: bool  # pack zeros instead: nothing of the weights is meant


def pack_launch(source: Source, target: Storage, shape: ConvShape, cut: Panels, m: int, positions: int) -> Launch:
    """Fill ``target`` with [group][panel][position][channel][column]: taps as they are, or transformed for squares of
    ``m``."""
    item = source.dtype.numpy.itemsize
    per_channel = positions * cut.columns * item
    channels = max(1, min(shape.depth, _NEAR // per_channel))
    numbers = {
        "panels": cut.count,
        "blocks": -(-shape.depth // channels),
        "channels": channels,
        "panel": cut.columns,
        "rest": cut.rest * cut.lanes,
        "depth": shape.depth,
        "width": 0 if source.zero else shape.width,
        **dict(zip(("kd", "kh", "kw"), shape.kernel)),
        "group_step": source.group,
        "out_step": source.out,
        "in_step": source.channel,
        **dict(zip(("d_step", "h_step", "w_step"), source.taps)),
        "group_elements": target.nbytes // item // shape.group,
        "panel_elements": positions * shape.depth * cut.columns,
    }
    spec = KernelSpec(
        f"pack weights {source.dtype}" + (f" for squares of {m}" if m else ""),
        ("pack panels", 1, source.dtype.name, m),
        lambda module, symbol, isa: _Packing(module, symbol, isa, source.dtype, m).function(),
    )
    return Launch(
        spec,
        (source.at, At(target)),
        tuple(numbers[name] for name in _FIELDS),
        tiles=shape.group * cut.count * numbers["blocks"],
        writes=(target,),
        flops=float(target.nbytes // item) if m else 0.0,
        traffic=float(target.nbytes + shape.group * shape.width * shape.depth * shape.taps * item),
        label="pack weights",
    )


class _Packing:
    def __init__(self, module: Module, symbol: str, isa: Isa, dtype: DType, m: int) -> None:
        self.m, self.element = m, register_type(dtype)
        self.lanes = isa.lanes(dtype.numpy.itemsize)
        self.f = f = module.kernel(symbol)
        self.at = Fields(f, f.args["dims"], _FIELDS)
        self.source, self.target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))

    def function(self) -> None:
        f, at = self.f, self.at
        apart = f.lane_ids(self.lanes) * f.splat(at["out_step"], self.lanes)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            line, block = f.div(tile, at["blocks"]), f.rem(tile, at["blocks"])
            group, panel = f.div(line, at["panels"]), f.rem(line, at["panels"])
            columns = f.select(f.cmp("eq", panel, at["panels"] - 1), at["rest"], at["panel"])
            place = f.gep(self.target, group * at["group_elements"] + panel * at["panel_elements"], self.element)
            first = block * at["channels"]
            with f.loop(first, f.min_(first + at["channels"], at["depth"])) as channel:
                start = group * at["group_step"] + channel * at["in_step"]
                with f.loop(0, columns, self.lanes) as column:
                    out = panel * at["panel"] + column
                    mask = below(f, self.lanes, f.max_(at["width"] - out, 0))
                    corner = f.gep(self.source, start + out * at["out_step"], self.element)
                    row = f.gep(place, channel * columns + column, self.element)
                    write = self.transformed if self.m else self.copied
                    write(corner, apart, mask, row, at["depth"] * columns)
        f.ret()

    def taken(self, corner: Val, offset: Val, apart: Val, mask: Val) -> Val:
        return self.f.gather(self.element, self.f.gep(corner, offset, self.element), apart, mask)

    def copied(self, corner: Val, apart: Val, mask: Val, row: Val, step: Val) -> None:
        f, at = self.f, self.at
        with f.loop(0, at["kd"]) as d, f.loop(0, at["kh"]) as h, f.loop(0, at["kw"]) as w:
            offset = d * at["d_step"] + h * at["h_step"] + w * at["w_step"]
            tap = (d * at["kh"] + h) * at["kw"] + w
            f.store(self.taken(corner, offset, apart, mask), f.gep(row, tap * step, self.element))

    def transformed(self, corner: Val, apart: Val, mask: Val, row: Val, step: Val) -> None:
        f, at = self.f, self.at
        lines = [
            [self.taken(corner, at["h_step"] * h + at["w_step"] * w, apart, mask) for w in range(3)] for h in range(3)
        ]
        for values in both_ways(f, self.m, lines, filter_values):
            for value in values:
                f.store(value, row)
                row = f.gep(row, step, self.element)
