"""Layers that follow each other, computed band by band where the tensor between them is larger than a cache.

A band is some rows of the last result. Everything that leads to it is computed for these rows alone, and the few more
that windows reach over, before the next band begins: what lies between two layers is written and read again while it
is in the core's own cache, and its memory is no larger than a band. Rows that two bands need are computed twice, which
is what it costs; :func:`chained` weighs that against what memory would have taken.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import field, replace

from ranvier.codegen.launch import At, Code, Launch
from ranvier.codegen.llvm.conv import front
from ranvier.codegen.llvm.conv.band_driver import CALL, INSIDE, MOVING, Head, Record, driver_spec
from ranvier.codegen.llvm.conv.origin import Origin
from ranvier.codegen.llvm.conv.pooling import Pooling, pool
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Operand
from ranvier.codegen.storage import ALIGNMENT, Storage, View
from ranvier.records import dataclass

_NEAR = 640 << 10  # bytes between the layers of a band: what stays in a core's cache beside weights and results
_FAR = 1280 << 10  # a tensor of so many bytes does not
_WEIGHTS = 384 << 10  # of all layers together, at most: every band reads them
_LONGEST = 6  # layers of a chain
_FLOPS, _FLOPS_DEPTHWISE = 100.0, 30.0  # per nanosecond
_SAVED = 0.08  # nanoseconds a byte between two layers takes less, written and read
_CALL_NS = 300.0  # of a launch in a band
_SURE = 1.2  # how much more than it costs a chain has to bring


Rows = tuple[int, int]
Layer = Origin | Pooling


def _rows_before(shape: ConvShape, rows: Rows) -> Rows:
    """The input rows that output rows are made of."""
    first = rows[0] * shape.strides[1] - shape.begin[1]
    last = (rows[1] - 1) * shape.strides[1] - shape.begin[1] + (shape.kernel[1] - 1) * shape.dilations[1]
    return min(max(0, first), shape.size[1]), max(0, min(shape.size[1], last + 1))


@dataclass
class _Chain:
    """Layers that are taken together, in bands of ``height`` rows of the last."""

    layers: Sequence[Layer]
    height: int
    gain: float = 0.0  # nanoseconds

    @property
    def bands(self) -> int:
        return -(-self.layers[-1].shape.out[1] // self.height)

    def rows(self, band: int) -> list[Rows]:
        """Output rows of every layer in a band."""
        total = self.layers[-1].shape.out[1]
        found = [(band * self.height, min(total, (band + 1) * self.height))]
        for layer in reversed(self.layers[1:]):
            found.append(_rows_before(layer.shape, found[-1]))
        return found[::-1]


def _line(layer: Layer) -> int:
    """Bytes of a row of the result."""
    return layer.shape.out[2] * layer.shape.cout * layer.out.dtype.numpy.itemsize


def _weights(layers: Sequence[Layer]) -> int:
    """Bytes of them."""
    return sum(layer.packed.storage.nbytes for layer in layers if isinstance(layer, Origin))


def _highest(layers: Sequence[Layer]) -> int:
    """How many rows of the last result are made of tensors that stay near.

    Away from the borders a layer has ``each`` rows for every one of the last, and ``more``. Two tensors are there at a
    time, the one a layer reads and the one it writes: what is of no use any more is written over.
    """
    each, more = 1, 0
    after_each = after_more = 0
    found = layers[-1].shape.out[1]
    for layer, reader in zip(layers[-2::-1], layers[:0:-1]):
        shape = reader.shape
        more = shape.strides[1] * (more - 1) + (shape.kernel[1] - 1) * shape.dilations[1] + 1
        each *= shape.strides[1]
        line = _line(layer)
        left = _NEAR - line * more - after_more
        found = min(found, left // (line * each + after_each))
        after_each, after_more = line * each, line * more
    return found


def _planned(layers: Sequence[Layer], threads: int) -> _Chain | None:
    """The chain with the highest bands that stay near, and what it gains; None where it gains nothing."""
    total = layers[-1].shape.out[1]
    saved = sum(_SAVED * nbytes for o in layers[:-1] if (nbytes := _line(o) * o.shape.out[1]) >= _FAR)
    if not saved or _weights(layers) > _WEIGHTS or isinstance(layers[0], Pooling):
        return None
    height = _highest(layers)
    if height < 1:
        return None
    count = max(-(-total // height), min(3 * threads, total // 4) if threads > 1 else 1)
    chain = _Chain(layers, -(-total // count))
    if chain.bands < 2:
        return None
    cost = _CALL_NS * chain.bands * len(layers)
    # those between the first and the last band are alike
    made = [(chain.rows(0), 1), (chain.rows(1), chain.bands - 2), (chain.rows(chain.bands - 1), 1)]
    for k, layer in enumerate(layers[:-1]):
        again = sum(count * (rows[k][1] - rows[k][0]) for rows, count in made) / layer.shape.out[1] - 1
        rate = _FLOPS_DEPTHWISE if layer.shape.is_depthwise else _FLOPS
        cost += again * layer.shape.flops / layer.shape.n / rate
    chain.gain = saved - _SURE * cost
    return chain if chain.gain > 0 else None


def chained(
    launches: Sequence[Launch], isa: Isa, threads: int, kept: Container[Storage]
) -> tuple[list[Launch], list[int]]:
    """The launches with chains of convolutions as one each, and for every one given its place among them.

    Tensors in ``kept`` are wanted by somebody who is no launch.
    """
    users: dict[Storage, int] = {}
    for launch in launches:
        for storage in {b.storage for b in launch.buffers if isinstance(b, At)}:
            users[storage] = users.get(storage, 0) + 1
    made: list[Launch] = []
    places: list[int] = []
    at = 0
    while at < len(launches):
        end = at + 1
        while end < len(launches) and _hands_on(launches[end - 1], launches[end], users, kept):
            end += 1
        for size, chain in _cut(launches[at:end], threads):
            members = launches[at : at + size]
            one = _Bands(chain, members, isa).launch() if chain is not None else None
            places += [len(made)] * size if one is not None else range(len(made), len(made) + size)
            made += members if one is None else [one]
            at += size
    return made, places


def _hands_on(a: Launch, b: Launch, users: Mapping[Storage, int], kept: Container[Storage]) -> bool:
    """Whether the result of ``a`` is read by ``b`` alone."""
    if not isinstance(a.origin, Layer) or not isinstance(b.origin, Layer):
        return False
    out, x = a.origin.out, b.origin.x
    if out.storage is not x.storage or out.storage.kind != "temp" or out.storage in kept or users[out.storage] != 2:
        return False
    return (out.shape, out.strides, out.offset, out.dtype) == (x.shape, x.strides, x.offset, x.dtype)


def _cut(launches: Sequence[Launch], threads: int) -> list[tuple[int, _Chain | None]]:
    """The run of launches in pieces, with their chains, so that most is gained."""
    layers = [launch.origin for launch in launches]
    best: list[tuple[float, list[tuple[int, _Chain | None]]]] = [(0.0, [])]
    for end in range(1, len(layers) + 1):
        gain, pieces = best[end - 1]
        found = (gain, [*pieces, (1, None)])
        for start in range(max(0, end - _LONGEST), end - 1):
            chain = _planned([o for o in layers[start:end] if isinstance(o, Layer)], threads)
            if chain is not None and best[start][0] + chain.gain > found[0]:
                found = (best[start][0] + chain.gain, [*best[start][1], (end - start, chain)])
        best.append(found)
    return best[-1][1]


def _part(view: View, image: int, rows: Rows) -> View:
    """Some rows of one image."""
    offset = view.offset + image * view.strides[0] + rows[0] * view.strides[2]
    shape = (1, view.shape[1], rows[1] - rows[0], view.shape[3])
    return View(view.storage, view.dtype, shape, view.strides, offset)


def _begin(view: View, image: int, row: int) -> At:
    """Where a row of an image lies."""
    offset = view.offset + image * view.strides[0] + row * view.strides[2]
    return At(view.storage, offset * view.dtype.numpy.itemsize)


def _offset(each: Operand, image: int, pixel: int) -> int:
    return each.offset + image * each.strides[0] + pixel * each.strides[1]


@dataclass
class _Made:
    """The launches of a band, and what of their buffers moves or lies in scratch."""

    launches: list[Launch]
    steps: list[int]  # the layer each belongs to
    moving: list[list[tuple[int, int]]]  # per launch: position of a buffer, number among what moves of its layer
    inside: list[list[tuple[int, Storage, int]]]  # per launch: position of a buffer, its storage, its offset
    first: int = 0  # of its launches among all


@dataclass
class _Bands:
    """Makes the launch of a chain."""

    chain: _Chain
    members: Sequence[Launch]
    isa: Isa
    regions: dict[Storage, tuple[object, ...]] = field(default_factory=dict)  # what shares memory has equal keys

    def launch(self) -> Launch | None:
        """None where a layer cannot be called in parts."""
        layers, chain = self.chain.layers, self.chain
        kinds: dict[tuple[object, ...], _Made] = {}
        order: list[_Made] = []
        calls: list[int] = []
        for image in range(layers[0].shape.n):
            for band in range(chain.bands):
                rows = chain.rows(band)
                kind = tuple([self._sizes(k, rows) for k in range(len(layers))])
                if kind not in kinds:
                    made = self._make([self._shape(k, sizes) for k, sizes in enumerate(kind)], image, rows)
                    if made is None or (order and made.steps != order[0].steps):
                        return None
                    made.first = sum(len(m.launches) for m in order)
                    kinds[kind] = made
                    order.append(made)
                calls += self._calls(kinds[kind], image, rows)
        return self._assembled(order, calls)

    def _sizes(self, k: int, rows: Sequence[Rows]) -> tuple[int, int, int]:
        """Rows that a layer reads and makes in a band, and those of its first window that lie before the image."""
        shape = self.chain.layers[k].shape
        out = rows[k]
        before = rows[k - 1] if k else _rows_before(shape, out)
        missing = before[0] - (out[0] * shape.strides[1] - shape.begin[1])
        return before[1] - before[0], out[1] - out[0], missing

    def _shape(self, k: int, sizes: tuple[int, int, int]) -> ConvShape:
        """The layer as the convolution of a band."""
        shape = self.chain.layers[k].shape
        before, out, missing = sizes
        return replace(
            shape,
            n=1,
            size=(1, before, shape.size[2]),
            out=(1, out, shape.out[2]),
            begin=(0, missing, shape.begin[2]),
        )

    def _moving(self, k: int, image: int, rows: Sequence[Rows]) -> list[At]:
        """Where the tensors of a layer that are no band's own begin for a band."""
        layer = self.chain.layers[k]
        found: list[At] = []
        if k == 0:
            found.append(_begin(layer.x, image, _rows_before(layer.shape, rows[0])[0]))
        if k == len(self.chain.layers) - 1:
            found.append(_begin(layer.out, image, rows[k][0]))
        if isinstance(layer, Origin) and layer.epilogue is not None:
            pixel = rows[k][0] * layer.shape.out[2]
            for each in layer.epilogue.operands:
                if each.strides[0] or each.strides[1]:
                    offset = each.view.offset + _offset(each, image, pixel)
                    found.append(At(each.view.storage, offset * each.dtype.numpy.itemsize))
        return found

    def _operands(self, layer: Layer, image: int, rows: Rows) -> list[Operand]:
        if isinstance(layer, Pooling) or layer.epilogue is None:
            return []
        first = rows[0] * layer.shape.out[2]
        return [replace(each, offset=_offset(each, image, first)) for each in layer.epilogue.operands]

    def _make(self, shapes: Sequence[ConvShape], image: int, rows: Sequence[Rows]) -> _Made | None:
        layers = self.chain.layers
        made = _Made([], [], [], [])
        x = _part(layers[0].x, image, _rows_before(layers[0].shape, rows[0]))
        for k, (layer, shape) in enumerate(zip(layers, shapes)):
            if k == len(layers) - 1:
                out = _part(layer.out, image, rows[k])
            else:
                size = (1, shape.cout, shape.out[1], shape.out[2])
                out = View.temporary(layer.out.dtype, size, (0, 2, 3, 1))
                out.storage.stands_for = layer.out.storage.stands_for
                self.regions[out.storage] = ("between", k % 2)
            begins = self._moving(k, image, rows)
            for number, launch in enumerate(self._parts(layer, x, out, shape, self._operands(layer, image, rows[k]))):
                if launch.rounds > 1 or not self._sort(made, launch, k, number, begins):
                    return None
            x = out
        return made

    def _parts(
        self, layer: Layer, x: View, out: View, shape: ConvShape, operands: Sequence[Operand]
    ) -> Sequence[Launch]:
        """The launches of a layer for a band."""
        if isinstance(layer, Pooling):
            return pool(x, out, shape, self.isa)
        epilogue = None if layer.epilogue is None else Epilogue(layer.epilogue.value, tuple(operands))
        return front.conv(x, layer.packed, out, shape, self.isa, epilogue=epilogue)

    def _sort(self, made: _Made, launch: Launch, k: int, number: int, begins: Sequence[At]) -> bool:
        """Note which buffers of a launch move and which lie in scratch; False where that is not clear."""
        moving: list[tuple[int, int]] = []
        inside: list[tuple[int, Storage, int]] = []
        for position, buffer in enumerate(launch.buffers):
            if isinstance(buffer, Code):
                continue
            if buffer in begins:
                if begins.count(buffer) > 1:
                    return False
                moving.append((position, begins.index(buffer)))
            elif buffer.storage.kind == "temp":
                if buffer.storage is self.chain.layers[0].x.storage:
                    return False
                self.regions.setdefault(buffer.storage, ("beside", k, number, position))
                inside.append((position, buffer.storage, buffer.offset))
            elif buffer.storage.kind != "const":
                return False
        made.launches.append(launch)
        made.steps.append(k)
        made.moving.append(moving)
        made.inside.append(inside)
        return len(moving) <= MOVING and len(inside) <= INSIDE

    def _calls(self, made: _Made, image: int, rows: Sequence[Rows]) -> list[int]:
        found: list[int] = []
        for number, k in enumerate(made.steps):
            begins = self._moving(k, image, rows)
            offsets = [begins[which].offset for _, which in made.moving[number]]
            found += [made.first + number, *offsets, *(0,) * (MOVING - len(offsets))]
        return found

    def _assembled(self, order: Sequence[_Made], calls: Sequence[int]) -> Launch:
        launches = [launch for made in order for launch in made.launches]
        moving = [each for made in order for each in made.moving]
        inside = [each for made in order for each in made.inside]
        scratch = 0

        def room(nbytes: int) -> int:
            nonlocal scratch
            start, scratch = scratch, scratch + -(-nbytes // ALIGNMENT) * ALIGNMENT
            return start

        sizes: dict[tuple[object, ...], int] = {}
        for storage, key in self.regions.items():
            sizes[key] = max(sizes.get(key, 0), storage.nbytes)
        pointers = [room(8 * len(launch.buffers)) for launch in launches]
        regions = {key: room(nbytes) for key, nbytes in sizes.items()}
        own = room(max(launch.scratch for launch in launches))
        buffers: list[At | Code] = [Code(launch.spec) for launch in launches]
        records: list[int] = []
        dims: list[int] = []
        ahead = len(Head) + len(launches) * Record.SIZE + len(calls)
        for k, launch in enumerate(launches):
            positions = [position for position, _ in moving[k]]
            pairs = [n for position, s, first in inside[k] for n in (position, regions[self.regions[s]] + first)]
            records += [k, len(buffers), len(launch.buffers), pointers[k], ahead + len(dims), launch.tiles, own]
            records += [len(positions), len(pairs) // 2, *positions, *(0,) * (MOVING - len(positions))]
            records += [*pairs, *(0,) * (2 * INSIDE - len(pairs))]
            dims += launch.dims
            hidden = {position for position, _, _ in inside[k]}
            for position, buffer in enumerate(launch.buffers):
                if position in hidden:
                    buffers.append(Code(launch.spec))  # the driver puts another address there
                elif position in positions and isinstance(buffer, At):
                    buffers.append(At(buffer.storage))
                else:
                    buffers.append(buffer)
        head = [len(launches), len(Head), len(order[0].launches), len(Head) + len(records)]
        assert len(calls) % (CALL * len(order[0].launches)) == 0
        first, last = self.chain.layers[0], self.chain.layers[-1]
        weights = _weights(self.chain.layers)
        return Launch(
            driver_spec(),
            tuple(buffers),
            (*head, *records, *calls, *dims),
            tiles=self.chain.bands * first.shape.n,
            writes=(last.out.storage,),
            scratch=scratch,
            flops=sum(member.flops for member in self.members),
            traffic=float(first.x.nbytes + last.out.nbytes + weights),
            label=" + ".join(member.label for member in self.members),
            rate=min(member.rate for member in self.members),
        )
