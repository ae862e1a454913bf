"""Matrix products whose epilogue is an expression of the loop IR.

``out[b, m, n] = value(sum over k of A[b, m, k] * B[b, k, n], …)``: views of rank 3 with any strides (0 along the batch
where one matrix serves all), so transposed operands are views like others. Sums are float32 (int32 of int8), the
epilogue is computed in registers, and there is one store. Few rows of output leave most of the GPU idle: then K is cut
into parts, whose sums a second kernel adds before it computes the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Final, Load, Map, Nest, Operand, Reduce, Result
from ranvier.codegen.loops.normalize import Rewriter
from ranvier.codegen.storage import View, dense_strides
from ranvier.codegen.triton import tune
from ranvier.codegen.triton.access import Access
from ranvier.codegen.triton.exprs import Value
from ranvier.codegen.triton.library import Call, Printed, kernel
from ranvier.codegen.triton.printer import HEADER, Pointer, Source, shared_operations
from ranvier.codegen.triton.schedule import PROCESSORS, Plan, power_of_two
from ranvier.codegen.triton.types import torch_name
from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.records import dataclass

Precision = Literal["ieee", "tf32", "tf32x3"]
_GROUP = 8  # tiles of rows that are worked on together, so that what they share stays in the cache
_INTEGERS = frozenset({DType.int8})
_OPERANDS = frozenset(
    {DType.float16, DType.bfloat16, DType.float32, DType.int8, DType.float8_e4m3fn, DType.float8_e5m2}
)


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows, columns and steps of K of a tile, parts of K, and how a program works on one."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1


# (rows, columns, warps, stages, how near to the GPU's rate it comes); depth follows from the element size
_TILES = (
    (128, 256, 8, 3, 1.0),
    (128, 128, 8, 4, 0.9),
    (64, 256, 8, 3, 0.85),
    (64, 128, 4, 4, 0.75),
    (64, 64, 4, 4, 0.55),
    (32, 128, 4, 4, 0.5),
    (32, 64, 4, 5, 0.4),
    (16, 128, 4, 4, 0.3),
    (16, 64, 4, 5, 0.25),
)


def tile_for(batch: int, m: int, n: int, k: int, itemsize: int) -> Tile:
    """The tile whose waves of programs take the least time, by how near to its rate each comes."""
    return likely_tiles(batch, m, n, k, itemsize, 1)[0]


def likely_tiles(batch: int, m: int, n: int, k: int, itemsize: int, count: int) -> list[Tile]:
    """The best few by that measure, the best one first."""
    lowest = max(16, power_of_two(min(m, 128)))
    found: list[tuple[float, Tile]] = []
    depth = {1: 128, 2: 64}.get(itemsize, 32)
    for rows, columns, warps, stages, rate in _TILES:
        if rows > lowest or (itemsize == 4 and rows * columns > 128 * 128) or columns > max(64, power_of_two(n)):
            continue
        programs = batch * -(-m // rows) * -(-n // columns)
        cost = -(-programs // PROCESSORS) * rows * columns / rate
        parts = 1
        while programs * parts * 2 <= PROCESSORS * 2 and k // (parts * 2) >= 4 * depth and parts < 16:
            parts *= 2
        found.append((cost, Tile(rows, columns, depth, warps, stages, parts if programs < PROCESSORS // 2 else 1)))
    found.sort(key=lambda each: each[0])
    return [tile for _, tile in found[:count]]


def tiles(batch: int, m: int, n: int, k: int, itemsize: int) -> list[Tile]:
    """Others that may be better, for tuning."""
    first = tile_for(batch, m, n, k, itemsize)
    found = [first]
    depth = first.depth
    for rows, columns, warps, stages, _ in _TILES:
        if rows <= max(16, 2 * power_of_two(m)) and not (itemsize == 4 and rows * columns > 128 * 128):
            found.append(Tile(rows, columns, depth, warps, stages, first.parts))
            found.append(Tile(rows, columns, depth, warps // 2 if warps == 8 else 8, max(2, stages - 1), 1))
    return list(dict.fromkeys(found))


def key_of(a: View, b: View, out: View) -> str:
    """What the best tile depends on: types, which axes are contiguous, and sizes to a power of two."""
    layout = "".join("t" if v.strides[1] == 1 and v.strides[2] != 1 else "n" for v in (a, b, out))
    sizes = "x".join(str(power_of_two(size)) for size in (*out.shape, a.shape[2]))
    return f"product {a.dtype} {out.dtype} {layout} {sizes}"


def product(
    a: View,
    b: View,
    out: View,
    epilogue: Epilogue | None = None,
    *,
    precision: Precision = "ieee",
    tile: Tile | None = None,
) -> Printed:
    """The kernels of a product. ``precision`` says how float32 operands are multiplied."""
    batch, m, n = out.shape
    k = a.shape[2]
    if a.dtype is not b.dtype or a.dtype not in _OPERANDS:
        raise NotSupported(f"no Triton product of {a.dtype} and {b.dtype}")
    if a.shape != (batch, m, k) or b.shape != (batch, k, n):
        raise ValueError(f"shapes {a.shape} and {b.shape} do not make {out.shape}")
    total = DType.int32 if a.dtype in _INTEGERS else DType.float32
    epilogue = epilogue or Epilogue(Result(0, total))
    if 0 in out.shape or k == 0:
        return kernel(_of_nothing(out, epilogue, total))
    if tile is None:
        kept = tune.chosen(key_of(a, b, out))
        tile = Tile(*kept) if kept and len(kept) == 6 else tile_for(batch, m, n, k, a.dtype.numpy.itemsize)

    def text(operands: tuple[Operand, ...], value: Expr) -> Source:
        return Product(a, b, operands, value, out.shape, tile, precision).source()

    return in_parts(text, out, epilogue, tile.parts, total)


def in_parts(
    text: Callable[[tuple[Operand, ...], Expr], Source], out: View, epilogue: Epilogue, parts: int, total: DType
) -> Printed:
    """Kernels of a product that ``text`` prints: one with its epilogue, or one for sums of parts of K and a second that
    adds them up."""
    if parts == 1:
        return Printed((Call(text((*epilogue.operands, Operand(out, out.strides)), epilogue.value)),))
    partial = View.temporary(total, (parts, *out.shape))
    whole = View(partial.storage, total, out.shape, dense_strides(out.shape))
    first = Call(text((Operand(whole, whole.strides),), Result(0, total)))
    rest = kernel(_combined(partial, out, epilogue, total))
    return Printed((first, *rest.calls), (partial.storage, *rest.temporaries))


def _of_nothing(out: View, epilogue: Epilogue, total: DType) -> Nest:
    """The epilogue of sums that have no terms."""
    value = Rewriter(lambda e: Const(0, total) if isinstance(e, Result) else e)(epilogue.value)
    operands = (*epilogue.operands, Operand(out, out.strides))
    return Nest(out.shape, operands, (Map(((len(epilogue.operands), value),)),), label="product")


def _combined(partial: View, out: View, epilogue: Epilogue, total: DType) -> Nest:
    """Parts of the sums added, then the epilogue."""
    moved = Rewriter(lambda e: Load(e.operand + 1, e.dtype) if isinstance(e, Load) else e)

    def widened(operand: Operand) -> Operand:
        made = moved.operand(operand)
        return Operand(made.view, (*made.strides, 0), made.offset, made.at, made.guard, made.other)

    strides = (*partial.strides[1:], partial.strides[0])
    operands = (Operand(partial, strides), *map(widened, epilogue.operands), Operand(out, (*out.strides, 0)))
    stages = (Reduce("sum", Load(0, total), total), Final(((len(operands) - 1, moved(epilogue.value)),)))
    return Nest((*out.shape, partial.shape[0]), operands, stages, frozenset({3}), "product")


def tune_product(
    a: View,
    b: View,
    out: View,
    memory: Any,
    device: str,
    epilogue: Epilogue | None = None,
    *,
    precision: Precision = "ieee",
    seconds: float = 5.0,
) -> Tile:
    """Measure tiles on memory that may be written to (temporaries are added to it); the best one, which is kept."""
    import torch

    batch, m, n = out.shape
    some = tiles(batch, m, n, a.shape[2], a.dtype.numpy.itemsize)

    def maker(tile: Tile) -> Callable[[], tune.Run]:
        def make() -> tune.Run:
            made = product(a, b, out, epilogue, precision=precision, tile=tile)
            where = memory[out.storage].device
            more = {s: torch.empty(s.nbytes, dtype=torch.uint8, device=where) for s in made.temporaries}
            return made.bound({**memory, **more})

        return make

    options = [((t.rows, t.columns, t.depth, t.warps, t.stages, t.parts), maker(t)) for t in some]
    fastest, times = tune.best(options, seconds=seconds)
    tune.keep(device, key_of(a, b, out), options[fastest][0], times, fastest)
    return some[fastest]


class Product(Access):
    """The text of one product; the epilogue is that of a tile of a nest over (batch, row, column)."""

    kind = "product"

    def __init__(
        self,
        a: View,
        b: View,
        operands: tuple[Operand, ...],
        value: Expr,
        shape: tuple[int, ...],
        tile: Tile,
        precision: Precision,
    ) -> None:
        nest = Nest(shape, operands, (Map(((len(operands) - 1, value),)),))
        how = Plan("tiled", (1,), (2,), (0,), (tile.rows, tile.columns), False, tile.warps)
        super().__init__(nest, how, shared_operations(nest))
        self.a, self.b, self.tile, self.precision = a, b, tile, precision
        self.final = value
        reach = max(sum(abs(s) * (n - 1) for s, n in zip(v.strides, v.shape)) for v in (a, b))
        self.wide = self.wide or reach >= 1 << 31

    def source(self) -> Source:
        a, b, tile = self.a, self.b, self.tile
        even = self.even()
        self.begin()
        self.multiply()
        value = self.typed(self.final)
        self.store(len(self.nest.operands) - 1, value)
        views = [a, b, *(o.view for o in self.nest.operands)]
        starts = [a.offset, b.offset, *(max(0, o.view.offset + o.offset) for o in self.nest.operands)]
        pointers = tuple(
            Pointer(v.storage, s * v.dtype.numpy.itemsize, torch_name(v.dtype), j == len(views) - 1)
            for j, (v, s) in enumerate(zip(views, starts))
        )
        constants = {"X": tile.rows, "R": tile.columns, "K": tile.depth, **even}
        params = ["a", "b", *(f"p{j}" for j in range(len(self.nest.operands))), *self.numbers]
        params += [f"{name}: tl.constexpr" for name in constants]
        name = f"{self.kind}_{a.dtype}"
        lines = ["@triton.jit", f"def {name}({', '.join(params)}):", *(f"    {line}" for line in self.lines)]
        programs = self.plan.programs(self.nest)
        return Source(
            HEADER + "\n".join(lines) + "\n",
            name,
            pointers,
            tuple(int(x) for x in self.numbers.values()),
            tuple((key, int(value)) for key, value in constants.items()),
            (programs, tile.parts, 1),
            tile.warps,
            tile.stages,
        )

    def begin(self) -> None:
        """This program's tile: groups of tiles of rows first, so that programs that run together share columns."""
        self.line("program = tl.program_id(0)")
        self.line(f"across = tl.cdiv({self.points('r')}, R)")
        self.line(f"down = tl.cdiv({self.points('x')}, X)")
        self.line("tile = program % (across * down)")
        self.line(f"first = tile // ({_GROUP} * across) * {_GROUP}")
        self.line(f"tall = tl.minimum(down - first, {_GROUP})")
        self.line(f"inside = tile % ({_GROUP} * across)")
        wide = ".to(tl.int64)" if self.wide else ""
        self.line(f"x = ((first + inside % tall) * X){wide} + tl.arange(0, X)[:, None]")
        self.line(f"r = (inside // tall * R){wide} + tl.arange(0, R)[None, :]")
        self.line(f"batch = (program // (across * down)){wide}")
        self.line(f"in_x = x < {self.points('x')}")
        self._flat["x"], self._inside[1] = Value("x", 1), "in_x"
        self._flat["b"] = Value("batch", 0)
        self._bind_row("r")

    def even(self) -> dict[str, bool]:
        """Along which axes all tiles are whole; kernels are compiled apart by it."""
        (_, m, n), tile = self.nest.extents, self.tile
        whole = self.a.shape[2] % (tile.depth * tile.parts) == 0
        return {"EVEN_X": m % tile.rows == 0, "EVEN_R": n % tile.columns == 0, "EVEN_K": whole}

    def multiply(self) -> None:
        k = self.a.shape[2]
        kind = self.sums()
        depth, parts = self.tile.depth, self.tile.parts
        self.line("k = tl.arange(0, K)")
        start, steps_of = "0", "k"
        if parts > 1:  # a part of K: a whole number of steps
            steps = -(-k // (depth * parts))
            self.line(f"part = tl.program_id(1) * {self.number('n_part', steps * depth)}")
            self.line(f"k_end = tl.minimum(part + n_part, {self.number('n_k', k)})")
            start, end, steps_of = "part", "k_end", "(part + k)"
        else:
            end = self.number("n_k", k)
        self.line(f"a_at = a + ({self._at('a', self.a, 'x', f'{steps_of}[None, :]', 1, 2)})")
        self.line(f"b_at = b + ({self._at('b', self.b, 'r', f'{steps_of}[:, None]', 2, 1)})")
        self.line(f"acc = tl.zeros((X, R), {kind})")
        with self.loop(f"for k_at in range({start}, {end}, K):"):
            self.line("if EVEN_X and EVEN_K:")
            self.line("    left = tl.load(a_at)")
            self.line("else:")
            self.line(f"    left = tl.load(a_at, mask=in_x & (k[None, :] < {end} - k_at), other=0)")
            self.line("if EVEN_R and EVEN_K:")
            self.line("    right = tl.load(b_at)")
            self.line("else:")
            self.line(f"    right = tl.load(b_at, mask=(k[:, None] < {end} - k_at) & in_r, other=0)")
            self.accumulate()
            self.line(f"a_at += K{self._times('a', self.a, 2)}")
            self.line(f"b_at += K{self._times('b', self.b, 1)}")
        self.finish()

    def sums(self) -> str:
        return "tl.int32" if self.a.dtype in _INTEGERS else "tl.float32"

    def accumulate(self) -> None:
        """One step: ``left`` and ``right`` multiplied."""
        how = f', input_precision="{self.precision}"' if self.a.dtype is DType.float32 else ""
        if self.a.dtype is DType.bfloat16:
            self.line("acc = lib.dot_bfloat16(left, right, acc)")
        else:
            self.line(f"acc = tl.dot(left, right, acc, out_dtype={self.sums()}{how})")

    def finish(self) -> None:
        """The sums are there; those of a part of K go to a place of their own."""
        if self.tile.parts > 1:
            out = self.nest.operands[-1]
            size = self.number("part_size", out.view.size)
            self.line(f"p{len(self.nest.operands) - 1} += tl.program_id(1).to(tl.int64) * {size}")
        self.results[0] = Value("acc", 3)

    def _at(self, name: str, view: View, outer: str, inner: str, outer_axis: int, inner_axis: int) -> str:
        terms = [outer + self._times(name, view, outer_axis), inner + self._times(name, view, inner_axis)]
        if view.strides[0] and view.shape[0] > 1:
            terms.append("batch" + self._times(name, view, 0))
        return " + ".join(terms)

    def _times(self, name: str, view: View, axis: int) -> str:
        return "" if view.strides[axis] == 1 else f" * {self.number(f'{name}_s{axis}', view.strides[axis])}"
