"""Products of integer matrices as a launch of the blocked driver that float products use."""

from __future__ import annotations

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx.micro import LINES, TileMicro, fetched_bytes, rest_bytes
from ranvier.codegen.llvm.amx.tiles import ROWS
from ranvier.codegen.llvm.gemm.blocks import TILE_US, Cut, grain
from ranvier.codegen.llvm.gemm.driver import Dim, driver_spec
from ranvier.codegen.llvm.gemm.problem import Axis, Problem
from ranvier.codegen.llvm.gemm.tiles import tiles
from ranvier.codegen.llvm.integer.dots import PAIRS, SIGNED, TILES, Dot, shapes_of
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.micro import IntegerMicro
from ranvier.codegen.llvm.integer.pack import NEAR_BYTES, PackedCodes
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_K_BLOCK = 1024  # groups of K whose panel of B and rows of A share the second-level cache
_A_BYTES = 512 << 10
_OTHER_K_BLOCKS, _OTHER_A_BYTES = (128, 256, 512, 1024, 4096), (64 << 10, 192 << 10, 1536 << 10)  # what tuning tries
_RESULT_BYTES = 32 << 10  # of rows that are finished, and of what is added to them: panel after panel writes a part …
_REREAD_BYTES = 512 << 10  # … where B is small enough to be read again for every such group of rows
_WAITING_BYTES = 256 << 10
_TILE_K_BLOCK = 1024  # the same where tiles are loaded from both: sums that wait cost more than a far panel
_GOPS, _TILE_GOPS, _GBPS = 300.0, 1500.0, 10.0  # rough speed of one core
FINISH_US = 0.4e-3  # for an element of the result, roughly: more than for multiplying where K is small


def problem_of(a: View, b: PackedCodes, out: View, epilogue: Epilogue | None) -> Problem:
    """A and B count in bytes."""
    batch = out.shape[:-2]
    m, n = out.shape[-2:]
    a_all = a.expanded((*batch, m, a.shape[-1])).strides
    factor = View.dense(b.storage, DType.uint8, (*b.batch, b.entry))
    entry = factor.expanded((*batch, b.entry))
    axes: list[Axis] = []
    for each in map(Axis, batch, a_all, entry.strides[:-1], out.strides):
        if each.extent == 1:
            continue
        last = axes[-1] if axes else None
        if last and all(x == y * each.extent for x, y in ((last.a, each.a), (last.b, each.b), (last.out, each.out))):
            axes[-1] = Axis(each.extent * last.extent, each.a, each.b, each.out)
        else:
            axes.append(each)
    return Problem(
        *(DType.int32, m, n, b.k, a, factor, out),
        a_strides=(a_all[-2], 1),
        b_strides=(0, 0),
        out_strides=(out.strides[-2], out.strides[-1]),
        batch=tuple(axes),
        epilogue=epilogue,
        alpha=1.0,
    )


def most_rows(isa: Isa, vectors: int) -> int:
    """Rows of the largest micro-kernel on panels of this width."""
    return min((t.vectors, t.rows) for t in tiles(shapes_of(isa)) if t.vectors >= vectors)[1]


def micro_kernels(rows: Cut, vectors: Cut, packed: PackedCodes, left: DType) -> tuple[KernelSpec, ...]:
    """Large and small row blocks of wide panels, then of narrow ones; what does not occur repeats another."""
    heights = [rows.size, rows.size - 1 if rows.large < rows.count else rows.size]
    widths = [vectors.size, vectors.size - 1 if vectors.large < vectors.count else vectors.size]
    if packed.dot is TILES:
        lines = LINES if packed.nbytes > NEAR_BYTES else 0  # of panels that are fetched ahead
        return tuple(TileMicro(left, packed.dot.right, v, lines=lines).spec() for v in widths for _ in heights)
    return tuple(IntegerMicro(r, v, packed.dot is PAIRS).spec() for v in widths for r in heights)


def row_blocks(m: int, isa: Isa, packed: PackedCodes) -> Cut:
    """Rows that are multiplied at a time."""
    return Cut.of(m, ROWS if packed.dot is TILES else most_rows(isa, packed.panels.cut.size))


def _k_block(k: int, several: bool, dot: Dot, most: int) -> int:
    """Groups of K that are multiplied at a time; ``several`` row blocks share a panel."""
    if not several or k <= most * 5 // 4:
        return k
    block = -(-k // -(-k // most))
    return -(-block // dot.step) * dot.step


def _finished(p: Problem) -> int:
    """Bytes of a row of results and of the operands that have rows of their own."""
    given = () if p.epilogue is None else p.epilogue.operands
    beside = sum(o.dtype.numpy.itemsize for o in given if o.strides[1] and o.strides[2])
    return p.n * (p.out.dtype.numpy.itemsize + beside)


def launch_of(p: Problem, b: PackedCodes, codes: View, isa: Isa, threads: int) -> Launch:
    lanes, panels = isa.lanes(4), b.panels
    rows = row_blocks(p.m, isa, b)
    wide = panels.cut.size * isa.vector_bytes
    k_block = tuning.choose(
        "integer depth",
        p.key,
        _k_block(p.k, rows.count > 1, b.dot, _TILE_K_BLOCK if b.dot is TILES else _K_BLOCK),
        lambda: {f"at most {most}": _k_block(p.k, rows.count > 1, b.dot, most) for most in _OTHER_K_BLOCKS},
    )
    k_blocks = -(-p.k // k_block) if p.k else 1
    tile_bytes = rows.size * wide
    operations = 2.0 * p.m * p.n * codes.shape[-1] * p.entries
    work = operations / (_TILE_GOPS if b.dot is TILES else _GOPS) / 1e3
    work += float(b.dot.unit) * p.k * p.n * p.entries / _GBPS / 1e3
    if p.epilogue is not None:
        work += p.m * p.n * p.entries * FINISH_US

    def groups(a_bytes: int) -> tuple[int, int]:
        row_group = Cut.of(rows.count, max(1, a_bytes // max(1, k_block * 4 * rows.size))).size
        if p.epilogue is not None and k_blocks == 1 and b.dot.unit * p.k * p.n <= _REREAD_BYTES:
            row_group = max(1, min(row_group, _RESULT_BYTES // (_finished(p) * rows.size)))
        panel_group = panels.cut.count
        if k_blocks > 1:
            panel_group = max(1, min(panel_group, _WAITING_BYTES // (row_group * tile_bytes)))
        if threads > 1:
            wanted = min(int(work / TILE_US), 8 * threads)
            others = p.entries * -(-rows.count // row_group)
            panel_group = min(panel_group, max(1, panels.cut.count * others // max(1, wanted)))
            others = p.entries * -(-panels.cut.count // panel_group)
            row_group = min(row_group, max(1, rows.count * others // max(1, wanted)))
        return row_group, panel_group

    sizes = {f"{size >> 10} KB of A": size for size in _OTHER_A_BYTES}
    row_group, panel_group = tuning.choose(
        "integer blocks", p.key, groups(_A_BYTES), lambda: {name: groups(size) for name, size in sizes.items()}
    )
    row_groups, panel_groups = -(-rows.count // row_group), -(-panels.cut.count // panel_group)
    count = p.entries * row_groups * panel_groups
    direct = panels.cut.count
    if p.epilogue is not None or p.out.dtype is not DType.int32 or (p.out_strides[1] != 1 and p.n > 1):
        direct = 0
    elif not isa.masks and p.n % lanes:
        direct -= 1
    reach = None if b.reach is None else b.reach.reshape(-1, p.n).max(axis=0)
    done = None
    if direct < panels.cut.count:
        done = integer_finish(p.epilogue, p.out.dtype, p.out_strides, reach, shortens=b.dot is SIGNED)
    waiting = tile_bytes if k_blocks > 1 else 0
    scratch = tile_bytes if done is not None or waiting else 0
    item = p.out.dtype.numpy.itemsize
    table = [x for axis in p.batch for x in (axis.extent, axis.a, axis.b, axis.out * item, 0)]
    numbers = {
        Dim.ROW_BLOCKS: rows.count,
        Dim.ROWS: rows.size,
        Dim.LARGE_ROWS: rows.large,
        Dim.SMALL_ROWS: rows.size - 1,
        Dim.PANELS: panels.cut.count,
        Dim.WIDE: wide,
        Dim.WIDE_PANELS: panels.cut.large,
        Dim.COLUMNS: p.n,
        Dim.LANES: lanes,
        Dim.LAST_LANES: panels.last_lanes,
        Dim.K: p.k,
        Dim.K_BLOCK: k_block,
        Dim.ROW_GROUP: row_group,
        Dim.PANEL_GROUP: panel_group,
        Dim.ROW_GROUPS: row_groups,
        Dim.PANEL_GROUPS: panel_groups,
        Dim.A_ROW: p.a_strides[0],
        Dim.A_K: 4,
        Dim.A_STEP: p.a_strides[0],
        Dim.OUT_ROW: p.out_strides[0] * 4,
        Dim.FINISHED: direct,
        Dim.ITEM: 4,
        Dim.FINISH_DIMS: Dim.BATCH + len(table),
        Dim.WAITING: waiting,
        Dim.NEXT: 1 + (threads - 1) * panel_group,
        Dim.REST: rest_bytes(codes.shape[-1]) if b.dot is TILES else 0,
        Dim.B_SHIFT: b.dot.narrower,
        Dim.FETCHED: fetched_bytes(LINES),
        Dim.RANK: len(p.batch),
    }
    micro = micro_kernels(rows, panels.cut, b, codes.dtype)
    a = At(p.a.storage, p.a.offset)
    return Launch(
        driver_spec(),
        (
            *(a, At(b.storage), At(p.out.storage, p.out.offset * item), a, a),
            *(Code(each) for each in micro),
            Code(done.spec if done else micro[0]),
            *(done.buffers if done else ()),
        ),
        (*(numbers.get(each, 0) for each in Dim if each is not Dim.BATCH), *table, *(done.dims if done else ())),
        tiles=count,
        writes=(p.out.storage,),
        grain=grain(count, work, threads),
        scratch=scratch * (row_group * panel_group if waiting else 1),
        flops=operations,
        traffic=float(4 * p.m * p.k + b.dot.unit * p.k * p.n + item * p.m * p.n) * p.entries,
        label="integer matmul",
    )
