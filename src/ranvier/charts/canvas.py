"""A canvas for charts: rectangles, lines, circles and text, written as SVG or as PNG.

Charts need no more than this, and a plotting library would be by far the heaviest thing to install.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ranvier.errors import CannotWrite, InvalidConfig, NotSupported
from ranvier.formats.files import write_files

INK, FAINT, GRID, PAPER = "#222222", "#666666", "#dddddd", "#ffffff"
# distinguishable in print and by people who see few colours
PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6bb1",
    "#b8a300",
    "#7f7f7f",
)
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_SYSTEM_FONTS = {False: ("DejaVuSans.ttf", "Arial.ttf", "arial.ttf"), True: ("DejaVuSans-Bold.ttf", "Arial Bold.ttf")}
_PLAIN = str.maketrans({"µ": "u", "×": "x", "←": "<-", "→": "->", "…": "...", "·": ".", "–": "-"})
_SHARP = 2  # pixels of a PNG for each unit of the canvas
_FINE = 2  # and drawn still larger, then reduced, for smooth edges


@dataclass(frozen=True)
class Shape:
    """One drawn thing; ``points`` are its corners, ends or centre."""

    kind: str  # rect, line, circle, text
    points: tuple[tuple[float, float], ...]
    fill: str = "none"
    stroke: str = "none"
    weight: float = 1.0
    dashes: tuple[float, ...] = ()
    radius: float = 0.0
    text: str = ""
    size: float = 0.0
    anchor: str = "start"
    bold: bool = False
    turned: bool = False  # text that runs upwards
    title: str = ""  # shown by a browser under the pointer


class Canvas:
    """Shapes in the order they are drawn; the origin is the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.shapes: list[Shape] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **style: Any) -> None:
        self.shapes.append(Shape("rect", ((x, y), (x + width, y + height)), fill=fill, **style))

    def line(self, points: Sequence[tuple[float, float]], stroke: str = INK, **style: Any) -> None:
        self.shapes.append(Shape("line", tuple(points), stroke=stroke, **style))

    def circle(self, x: float, y: float, radius: float, fill: str, **style: Any) -> None:
        self.shapes.append(Shape("circle", ((x, y),), fill=fill, radius=radius, **style))

    def text(self, x: float, y: float, text: str, size: float = 12.0, fill: str = INK, **style: Any) -> None:
        """``y`` is the base line."""
        self.shapes.append(Shape("text", ((x, y),), fill=fill, text=text, size=size, **style))

    def write(self, path: Path) -> None:
        """To a file of the kind its name says."""
        suffix = path.suffix.lower()
        if suffix == ".svg":
            content = self.svg().encode()
        elif suffix == ".png":
            content = self.png()
        else:
            raise InvalidConfig(f"cannot draw into {path.name!r}: the name must end in .svg or .png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        write_files({path: [content]})

    # -- SVG --------------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="{_FONT}">'
        )
        background = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        return "\n".join([head, background, *(_element(shape) for shape in self.shapes), "</svg>", ""])

    # -- PNG --------------------------------------------------------------------------------------------------------

    def png(self) -> bytes:
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise NotSupported("drawing PNG takes Pillow: pip install 'ranvier[image]', or draw .svg") from None
        factor = _SHARP * _FINE
        size = (round(self.width * factor), round(self.height * factor))
        image = Image.new("RGB", size, PAPER)
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            _paint(draw, image, shape, factor)
        small = image.resize((round(self.width * _SHARP), round(self.height * _SHARP)), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, "PNG", optimize=True)
        return buffer.getvalue()


def text_width(text: str, size: float) -> float:
    """About how wide a text is; a little too much rather than too little."""
    return sum(0.38 if c in "iljtfr.,:;|!'()[] " else 0.88 if c in "mwMW@%" else 0.62 for c in text) * size


def shortened(text: str, size: float, room: float) -> str:
    """The text, or as much of its end as has room (names of nodes are paths); nothing where that would be little."""
    if text_width(text, size) <= room:
        return text
    while text and text_width("…" + text, size) > room:
        text = text[1:]
    return "…" + text if len(text) > 3 else ""


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _element(shape: Shape) -> str:
    (x, y), *rest = shape.points
    style = ""
    if shape.stroke != "none":
        style += f' stroke="{shape.stroke}" stroke-width="{shape.weight:g}"'
        if shape.dashes:
            style += f' stroke-dasharray="{" ".join(f"{d:g}" for d in shape.dashes)}"'
    if shape.kind == "line":
        points = " ".join(f"{_number(a)},{_number(b)}" for a, b in shape.points)
        body = f'<polyline points="{points}" fill="none"{style}'
    elif shape.kind == "rect":
        (right, bottom) = rest[0]
        body = (
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(right - x)}" height="{_number(bottom - y)}" '
            f'fill="{shape.fill}"{style}'
        )
    elif shape.kind == "circle":
        body = f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(shape.radius)}" fill="{shape.fill}"{style}'
    else:
        return _text_element(shape, x, y)
    title = f"><title>{escape(shape.title)}</title></{body[1 : body.index(' ')]}>" if shape.title else "/>"
    return body + title


def _text_element(shape: Shape, x: float, y: float) -> str:
    where = f'x="{_number(x)}" y="{_number(y)}"'
    if shape.turned:
        where = f'transform="translate({_number(x)} {_number(y)}) rotate(-90)"'
    weight = ' font-weight="bold"' if shape.bold else ""
    anchor = f" text-anchor={quoteattr(shape.anchor)}" if shape.anchor != "start" else ""
    return f'<text {where} font-size="{shape.size:g}" fill="{shape.fill}"{anchor}{weight}>{escape(shape.text)}</text>'


def _paint(draw: Any, image: Any, shape: Shape, factor: float) -> None:
    points = [(x * factor, y * factor) for x, y in shape.points]
    outline = None if shape.stroke == "none" else shape.stroke
    width = max(1, round(shape.weight * factor))
    if shape.kind == "rect":
        draw.rectangle([*points[0], *points[1]], fill=_or_none(shape.fill), outline=outline, width=width)
    elif shape.kind == "circle":
        (x, y), r = points[0], shape.radius * factor
        draw.ellipse([x - r, y - r, x + r, y + r], fill=_or_none(shape.fill), outline=outline, width=width)
    elif shape.kind == "line":
        for piece in _dashed(points, [d * factor for d in shape.dashes]):
            draw.line(piece, fill=shape.stroke, width=width, joint="curve")
    else:
        _paint_text(draw, image, shape, points[0], factor)


def _or_none(colour: str) -> str | None:
    return None if colour == "none" else colour


def _paint_text(draw: Any, image: Any, shape: Shape, at: tuple[float, float], factor: float) -> None:
    from PIL import Image, ImageDraw

    font, complete = _font(shape.size * factor, shape.bold)
    text = shape.text if complete else shape.text.translate(_PLAIN)
    if not shape.turned:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        draw.text(at, text, fill=shape.fill, font=font, anchor=anchor)
        return
    length, height = round(draw.textlength(text, font=font)) + 4, round(shape.size * factor * 1.6)
    strip = Image.new("RGBA", (length, height), (0, 0, 0, 0))
    base = shape.size * factor * 1.2
    ImageDraw.Draw(strip).text((2, base), text, fill=shape.fill, font=font, anchor="ls")
    strip = strip.rotate(90, expand=True)
    before = {"start": length, "middle": length / 2, "end": 0.0}[shape.anchor]
    image.paste(strip, (round(at[0] - base), round(at[1] - before)), strip)


@functools.cache
def _font(size: float, bold: bool) -> tuple[Any, bool]:
    """A font of the system, or Pillow's own; and whether it has more letters than the plain ones."""
    from PIL import ImageFont

    for name in _SYSTEM_FONTS[bold]:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size), True
    return ImageFont.load_default(size), False


def _dashed(points: Sequence[tuple[float, float]], dashes: Sequence[float]) -> Iterator[list[tuple[float, float]]]:
    """A line cut into its dashes; the whole of it where there are none."""
    if not dashes:
        yield list(points)
        return
    k, left, on = 0, dashes[0], True
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        done = 0.0
        while length - done > 1e-9:
            step = min(left, length - done)
            if on:
                a, b = done / length, (done + step) / length
                yield [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in (a, b)]
            done += step
            left -= step
            if left <= 1e-9:
                k, on = k + 1, not on
                left = dashes[k % len(dashes)]
