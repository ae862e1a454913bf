"""Sizes of a convolution, as numbers, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Triple = tuple[int, int, int]


def triple(values: Sequence[int], filler: int) -> Triple:
    """Spatial numbers as depth, height, width: missing leading axes are ``filler``."""
    if len(values) > 3:
        raise ValueError(f"a convolution has at most 3 spatial axes, not {len(values)}")
    a, b, c = (*(filler,) * (3 - len(values)), *(int(v) for v in values))
    return a, b, c


@dataclass(frozen=True)
class ConvShape:
    """A convolution (or transposed convolution) in numbers; 1-D and 2-D ones have leading spatial axes of size 1.

    For a transposed convolution ``size`` and ``out`` are still those of its input and output, and ``cin`` and ``cout``
    its input's and output's channels.
    """

    n: int
    group: int
    cin: int
    cout: int
    size: Triple  # of the input
    out: Triple  # of the output
    kernel: Triple
    strides: Triple
    dilations: Triple
    begin: Triple  # padding before; what stands behind follows from ``out``

    @classmethod
    def conv(
        cls,
        x: Sequence[int],
        w: Sequence[int],
        *,
        strides: Sequence[int] = (),
        dilations: Sequence[int] = (),
        pads: Sequence[int] = (),
        group: int = 1,
    ) -> ConvShape:
        """From ONNX's attributes (``pads`` explicit: all begins, then all ends)."""
        rank = len(x) - 2
        size, kernel = triple(x[2:], 1), triple(w[2:], 1)
        step, spread = triple(strides or (1,) * rank, 1), triple(dilations or (1,) * rank, 1)
        pads = tuple(pads) or (0,) * (2 * rank)
        begin, end = triple(pads[:rank], 0), triple(pads[rank:], 0)
        out = [
            (i + b + e - (k - 1) * d - 1) // s + 1 for i, b, e, k, d, s in zip(size, begin, end, kernel, spread, step)
        ]
        out3 = triple([max(0, o) for o in out], 1)
        return cls(int(x[0]), group, int(x[1]), int(w[0]), size, out3, kernel, step, spread, begin)

    @classmethod
    def transpose(
        cls,
        x: Sequence[int],
        w: Sequence[int],
        *,
        strides: Sequence[int] = (),
        dilations: Sequence[int] = (),
        pads: Sequence[int] = (),
        output_padding: Sequence[int] = (),
        group: int = 1,
    ) -> ConvShape:
        """Of a ConvTranspose; ``w`` is [cin, cout/group, *kernel]."""
        rank = len(x) - 2
        size, kernel = triple(x[2:], 1), triple(w[2:], 1)
        step, spread = triple(strides or (1,) * rank, 1), triple(dilations or (1,) * rank, 1)
        pads = tuple(pads) or (0,) * (2 * rank)
        begin, end = triple(pads[:rank], 0), triple(pads[rank:], 0)
        extra = triple(output_padding or (0,) * rank, 0)
        out = [
            s * (i - 1) + o + (k - 1) * d + 1 - b - e
            for i, b, e, k, d, s, o in zip(size, begin, end, kernel, spread, step, extra)
        ]
        out3 = triple([max(0, o) for o in out], 1)
        return cls(int(x[0]), group, int(x[1]), int(w[1]) * group, size, out3, kernel, step, spread, begin)

    def key(self) -> tuple[object, ...]:
        """What decisions about the convolution depend on."""
        sizes = (self.n, self.group, self.cin, self.cout)
        return (*sizes, self.size, self.out, self.kernel, self.strides, self.dilations, self.begin)

    @property
    def is_column(self) -> bool:
        """A signal that lies along the height: as a row, several of its pixels are computed at once."""
        return self.size[2] == self.kernel[2] == self.out[2] == 1 and self.begin[2] == 0 and self.out[1] > 1

    def as_row(self) -> ConvShape:
        """Height and width in each other's place, as :func:`lying` has them of a view."""

        def turned(t: Triple) -> Triple:
            return t[0], t[2], t[1]

        return replace(
            self,
            size=turned(self.size),
            out=turned(self.out),
            kernel=turned(self.kernel),
            strides=turned(self.strides),
            dilations=turned(self.dilations),
            begin=turned(self.begin),
        )

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    @property
    def pixels(self) -> int:
        """Output pixels of one image."""
        return self.out[0] * self.out[1] * self.out[2]

    @property
    def depth(self) -> int:
        """Input channels of one group."""
        return self.cin // self.group

    @property
    def width(self) -> int:
        """Output channels of one group."""
        return self.cout // self.group

    @property
    def flops(self) -> float:
        return 2.0 * self.n * self.pixels * self.cout * self.depth * self.taps

    @property
    def is_empty(self) -> bool:
        return 0 in (self.n, self.cout, self.pixels)

    @property
    def is_flat(self) -> bool:
        """Of pictures, not of volumes."""
        return self.kernel[0] == self.size[0] == self.out[0] == 1 and self.begin[0] == 0

    @property
    def is_depthwise(self) -> bool:
        return self.depth == 1 and self.group > 1


@dataclass(frozen=True)
class Packed:
    """Weights in the order a kernel reads them. ``kind`` names the kernel they were packed for."""

    kind: str
    storage: Storage
    dtype: DType
    block: int = 0  # meaning is the kernel's: vectors per panel …


def sums_of(dtype: DType) -> DType:
    """The type of the sums of products of such operands."""
    return DType.float32 if dtype is DType.float16 else dtype


def packed_constant(kind: str, array: np.ndarray[Any, Any], dtype: DType, block: int = 0) -> Packed:
    return Packed(kind, Storage.packed(np.ascontiguousarray(array), f"packed {kind} weights"), dtype, block)


@dataclass(frozen=True)
class Pixels:
    """Strides of a channels-last view by image, depth, height and width (its channel stride is 1)."""

    n: int
    d: int
    h: int
    w: int

    @classmethod
    def of(cls, view: View) -> Pixels:
        d, h, w = triple(view.strides[2:], 0)
        depth, height, width = triple(view.shape[2:], 1)
        if width == 1:  # an axis of one pixel has no stride of its own: let it continue the next outer one
            w = h if height > 1 else d
        if height == 1:
            h = w * width
        return cls(view.strides[0], d if depth > 1 else h * height, h, w)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return self.n, self.d, self.h, self.w


@dataclass(frozen=True)
class Numbering:
    """The number an epilogue knows an output pixel by: ``first + d * od + h * oh + w * ow``.

    Plain row-major order for a whole output; a phase of a transposed convolution writes every s-th pixel.
    """

    d: int
    h: int
    w: int
    first: int

    @classmethod
    def plain(cls, out: Triple) -> Numbering:
        return cls(out[1] * out[2], out[2], 1, 0)

    @property
    def fields(self) -> dict[str, int]:
        return {"qd": self.d, "qh": self.h, "qw": self.w, "q0": self.first}


def lying(view: View) -> View:
    """Height and width in each other's place."""
    shape, strides = ((*t[:-2], t[-1], t[-2]) for t in (view.shape, view.strides))
    return replace(view, shape=shape, strides=strides)


def require_channels_last(view: View, what: str) -> None:
    if view.shape[1] != 1 and view.strides[1] != 1:
        raise ValueError(f"{what} of a convolution must lie channels-last (stride 1), not {view.strides[1]}")


@dataclass(frozen=True)
class Shuffle:
    """Columns of a product that become pixels: column ``tap * channels + c`` of a row is channel ``c`` of the output
    pixel that lies the tap's steps beyond the row's first. A transposed convolution whose kernel is its stride."""

    channels: int
    kernel: Triple
    steps: Triple  # in the output, in elements
    numbers: Triple  # in the epilogue's numbering

    @property
    def fields(self) -> dict[str, int]:
        return {
            "fc": self.channels,
            "fh": self.kernel[1],
            "fw": self.kernel[2],
            **dict(zip(("fyd", "fyh", "fyw"), self.steps)),
            **dict(zip(("fqd", "fqh", "fqw"), self.numbers)),
        }


NO_SHUFFLE = Shuffle(1, (1, 1, 1), (0, 0, 0), (0, 0, 0))
