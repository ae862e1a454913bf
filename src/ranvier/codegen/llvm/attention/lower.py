"""From views of queries, keys and values to launches: which kernel, how it is tiled, and its numbers."""

from __future__ import annotations

import struct
from typing import Literal

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.attention import decode, prefill
from ranvier.codegen.llvm.attention.micro import (
    ELEMENTS,
    LOG2E,
    Shape,
    most_vectors,
    product,
    shape_for,
    transposing_pack,
)
from ranvier.codegen.llvm.attention.softmax import Scoring
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_LENGTH_TYPES = {DType.int32: "i32", DType.int64: "i64"}
# Rows of a tile: enough that packing the keys is a few percent of the work.
_TILE_ROWS = 256
# Keys of a block: the fewer blocks the less the softmax costs; keys and values stay in the second-level cache.
_BLOCK_KEYS = 512
_BLOCK_BYTES = 512 << 10
# Rows of values this far apart fall on few sets of the first-level cache; so many queries are worth a copy.
_FAR_APART = 1024
_COPY_ROWS = 192
_ROWS_AT_ONCE = 12
# Fewer queries than this of heads that share keys are worth a copy, to be worked on together.
_STACKED = 48
# Keys and values past this size come from memory at every step.
_FAR_BYTES = 2 << 20
# Keys of one stretch of a cache.
_STRETCH = 1024


def supported(q: DType, mask: DType | None = None, lengths: DType | None = None) -> str | None:
    """None where :func:`attention` takes such operands, or the reason why not."""
    if q not in ELEMENTS:
        return f"attention in {q.name}"
    if mask not in (None, DType.bool, q):
        return f"an attention mask of {mask.name} for {q.name}"
    if lengths is not None and lengths not in _LENGTH_TYPES:
        return f"key lengths of {lengths.name}"
    return None


@dataclass(frozen=True)
class _Call:
    """Checked operands of one attention."""

    q: View
    k: View
    v: View
    out: View
    isa: Isa
    scoring: Scoring
    mask: View | None
    lengths: View | None
    numbers: dict[str, int]
    threads: int

    @property
    def element(self) -> str:
        return self.scoring.element

    @property
    def shape(self) -> Shape:
        return shape_for(self.element, self.isa)

    @property
    def rows(self) -> int:
        """Rows that share a key head."""
        return self.q.shape[1] // self.k.shape[1] * self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.numbers["keys"]

    def unit(self, view: View) -> bool:
        return view.strides[3] == 1 or view.shape[3] <= 1

    def buffers(self) -> list[At | Code]:
        found = [*(self.q, self.k, self.v, self.out), *([self.mask] if self.mask else [])]
        return [At.of(view) for view in [*found, *([self.lengths] if self.lengths else [])]]

    def flops(self) -> float:
        """Both products, and the softmax between."""
        pairs = self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.keys
        seen = 0.5 if self.scoring.causal and self.q.shape[2] == self.keys else 1.0
        return seen * pairs * (2.0 * self.q.shape[3] + 2.0 * self.v.shape[3] + 16.0)

    def traffic(self) -> float:
        return 1.0 * sum(view.nbytes for view in (self.q, self.k, self.v, self.out))


def attention(
    q: View,
    k: View,
    v: View,
    out: View,
    isa: Isa,
    *,
    scale: float,
    mask: View | None = None,
    causal: bool = False,
    offset: int | None = None,
    left_window: int = -1,
    right_window: int = -1,
    softcap: float = 0.0,
    kv_lengths: View | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``softmax(scale * q kᵀ + mask) v`` with q ``[batch, heads, queries, size]``, k and v over their (fewer) heads.

    Any strides. ``mask`` broadcasts to ``[batch, heads, queries, keys]``, is added or (bool) says what may be seen;
    keys past the end of a shorter mask are not seen. With ``causal``, query i sees keys up to ``i + offset``; without
    an offset the last query stands at the last valid key. Windows (if not
    negative) bound how far before and after its own position a query sees. ``kv_lengths`` holds the number of valid
    keys per batch entry. A row that sees no key is zero, and a masked key plays no part even where its score is NaN.
    """
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    assert heads % kv_heads == 0 and k.shape == (batch, kv_heads, keys, width), f"{q.shape} and {k.shape}"
    assert v.shape[:3] == k.shape[:3] and out.shape == (batch, heads, queries, v.shape[3]), f"{v.shape}, {out.shape}"
    if 0 in out.shape:
        return []
    by_length = offset is None and kv_lengths is not None
    offset = keys - queries if offset is None else offset
    if mask is not None and mask.rank and 1 < mask.shape[-1] < keys:
        keys = mask.shape[-1]
    if mask is not None:
        mask = mask.expanded((batch, heads, queries, keys))
    element = ELEMENTS[q.dtype]
    scoring = Scoring(
        element,
        "none" if mask is None else "bool" if mask.dtype is DType.bool else "float",
        mask is None or mask.strides[3] == 1,
        softcap != 0,
        softcap != 0 or mask is not None or scale <= 0,
        causal or right_window >= 0,
        left_window >= 0,
        "none" if kv_lengths is None else _LENGTH_TYPES[kv_lengths.dtype],  # type: ignore[arg-type]
    )
    numbers = {
        "scale": _bits(scale / softcap if softcap else scale),
        "cap": _bits(softcap),
        "rate": _bits(LOG2E if scoring.scaled else scale * LOG2E),
        "group": heads // kv_heads,
        "queries": queries,
        "keys": keys,
        "width": width,
        "out_width": v.shape[3],
        "offset": offset,
        "offset_by_length": int(by_length),
        "reach": 0 if causal else right_window,
        "left": left_window,
        "length_step": 0 if kv_lengths is None else kv_lengths.strides[0],
        **_strides("q", q, ("batch", "head", "query", "width")),
        **_strides("k", k, ("batch", "head", "key", "width")),
        **_strides("v", v, ("batch", "head", "key", "width")),
        **_strides("out", out, ("batch", "head", "query", "step")),
        **_strides("mask", mask, ("batch", "head", "query", "key")),
        "kv_heads": kv_heads,
    }
    call = _Call(q, k, v, out, isa, scoring, mask, kv_lengths, numbers, threads)
    if call.rows <= call.shape.rows and call.unit(k) and call.unit(v):
        return _decode(call)
    return _prefill(call, call.unit(v) and v.shape[3] % call.shape.lanes == 0)


def _prefill(call: _Call, whole_values: bool) -> list[Launch]:
    shape, numbers = call.shape, dict(call.numbers)
    batch, heads, queries, width = call.q.shape
    whole_rows = call.out.shape[3] % shape.lanes == 0
    direct = (
        call.unit(call.q) and call.unit(call.out) and whole_rows and (queries >= _STACKED or heads == call.k.shape[1])
    )
    group = heads // call.k.shape[1]
    stacked = 1 if direct else group
    rows, tile_heads = stacked * queries, heads // stacked
    chunks = -(-rows // _TILE_ROWS)
    # a tile fewer rows long when that is what gives every thread work
    while batch * tile_heads * chunks < 4 * call.threads and rows // chunks > 48:
        chunks += 1
    chunk = _up(-(-rows // chunks), shape.rows)
    chunks = -(-rows // chunk)
    values: Literal["in place", "rows", "elements"] = "in place" if whole_values else "elements"
    if whole_values and chunk >= _COPY_ROWS and call.v.strides[2] * shape.bytes >= _FAR_APART:
        values = "rows"
    per_key = (width + call.v.shape[3]) * shape.bytes
    block = min(_up(max(call.keys, 1), shape.columns), _up(min(_BLOCK_BYTES // per_key, _BLOCK_KEYS), shape.columns))
    at_once = min(_up(_ROWS_AT_ONCE, shape.rows), chunk)
    q_stride, o_stride = _up(width, shape.lanes), _up(call.v.shape[3], shape.lanes)
    rest = -(-call.keys // shape.lanes) % shape.vectors or shape.vectors
    panels, value_rest = divmod(o_stride // shape.lanes, shape.vectors)
    sizes = {
        "queries": 0 if direct else chunk * q_stride,
        "at_out": 0 if direct else chunk * o_stride,
        "at_keys": block * q_stride,
        "at_values": 0 if values == "in place" else block * o_stride,
        "at_scores": at_once * block,
        "at_top": chunk,
        "at_total": chunk,
        "at_keep": chunk,
    }
    used = 0
    for name, size in sizes.items():
        if name != "queries":  # they come first
            numbers[name] = used
        used += _up(size * shape.bytes, 64)
    numbers |= {
        "group": stacked,
        "share": group // stacked,
        "tile_heads": tile_heads,
        "chunks": chunks,
        "chunk": chunk,
        "block": block,
        "rows_at_once": at_once,
        "spare_vectors": rest,
        "value_panels": panels,
        "value_rest": value_rest,
    }
    layout = prefill.Layout(direct, call.unit(call.q), call.unit(call.k), values, call.unit(call.out))
    last = rows % chunk % shape.rows or shape.rows
    codes = [
        Code(transposing_pack(call.element)),
        *(
            Code(product(call.element, count, vectors))
            for count in (shape.rows, last)
            for vectors in (shape.vectors, rest, shape.vectors, value_rest or shape.vectors)
        ),
    ]
    kernel, tiles = prefill.spec(call.scoring, layout), batch * tile_heads * chunks
    return [_launch(call, kernel, [*call.buffers(), *codes], numbers, prefill.DIMS, tiles, used, call.out.storage)]


def _decode(call: _Call) -> list[Launch]:
    shape, numbers = call.shape, dict(call.numbers)
    batch, kv_heads = call.k.shape[:2]
    heads = batch * kv_heads
    splits = max(1, -(-call.keys // _STRETCH)) if call.keys else 1
    stretch = _up(-(-call.keys // splits), shape.lanes) or shape.lanes
    rows = call.rows
    o_stride, q_stride = _up(call.v.shape[3], shape.lanes), _up(call.q.shape[3], shape.lanes)
    whole = call.v.shape[3] // shape.lanes  # vectors of values; what is left of a row is masked
    vectors = max(1, min(most_vectors(rows, call.isa), whole))
    panels, rest = divmod(whole, vectors)
    area = _up((rows * o_stride + 3 * rows) * shape.bytes, 64)
    at_scores = _up(rows * q_stride * shape.bytes, 64)
    at_area = at_scores + _up(rows * stretch * shape.bytes, 64)
    numbers |= {
        "splits": splits,
        "stretch": stretch,
        "value_panels": panels,
        "panel_columns": vectors * shape.lanes,
        "value_rest": rest,
        "area": area,
        "at_scores": at_scores,
        "at_area": at_area,
        "at_weights": _up(o_stride * shape.bytes, 64),
    }
    unit_out = call.unit(call.out)
    far = call.k.nbytes > _FAR_BYTES
    kernel = decode.spec(call.scoring, unit_q=call.unit(call.q), unit_out=unit_out, far=far)
    partial = Storage.temporary(heads * splits * area, "attention") if splits > 1 else call.out.storage
    codes = [Code(product(call.element, rows, n, far=far)) for n in (vectors, rest or vectors)]
    buffers = [*call.buffers(), At(partial), *codes]
    first = _launch(call, kernel, buffers, numbers, decode.DIMS, heads * splits, at_area + area, partial)
    if splits == 1:
        return [first]
    scratch = numbers["at_weights"] + _up(splits * shape.bytes, 64)
    last = Launch(
        decode.combine_spec(call.element, unit_out=unit_out, masked=call.scoring.mask == "float"),
        (At.of(call.q), At.of(call.out), At(partial)),
        tuple(numbers[n] for n in decode.COMBINE_DIMS),
        tiles=heads,
        writes=(call.out.storage,),
        scratch=scratch,
        flops=2.0 * heads * splits * rows * o_stride,
        traffic=1.0 * (partial.nbytes + call.out.nbytes),
        label="attention",
    )
    return [first, last]


def _launch(
    call: _Call,
    kernel: KernelSpec,
    buffers: list[At | Code],
    numbers: dict[str, int],
    names: tuple[str, ...],
    tiles: int,
    scratch: int,
    written: Storage,
) -> Launch:
    return Launch(
        kernel,
        tuple(buffers),
        tuple(numbers[n] for n in names),
        tiles=tiles,
        writes=(written,),
        scratch=scratch,
        flops=call.flops(),
        traffic=call.traffic(),
        label="attention",
    )


def _strides(prefix: str, view: View | None, names: tuple[str, ...]) -> dict[str, int]:
    strides = (0,) * len(names) if view is None else view.strides
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides)}


def _bits(value: float) -> int:
    """A double as the int64 of its bits: numbers travel among the dims."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
