"""Pieces of SVG that pictures of graphs are made of; texts come from models, so nothing is written unescaped."""

from __future__ import annotations

import re
import unicodedata
from xml.sax.saxutils import escape

from ranvier.graph.layout import Link
from ranvier.graph.types import TensorType, Type

NAMESPACE = "http://www.w3.org/2000/svg"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW, _WIDE = frozenset("fijlrtI.,:;!|()[]{} '"), frozenset("mwMW@%—")


def xml(text: str) -> str:
    """As the content of an element; what XML cannot hold at all is replaced."""
    return escape(_NOT_XML.sub("�", text))


def attribute(text: str) -> str:
    """As an attribute, quotes included."""
    return '"' + escape(_NOT_XML.sub("�", text), {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}) + '"'


def one_line(text: str) -> str:
    """Without what would break a line or turn the direction of the text around it."""
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp") else "·" for c in text)


def short(text: str, limit: int) -> str:
    """Cut in the middle: both ends of a generated name say something."""
    if len(text) <= limit:
        return text
    keep = limit - 1
    return f"{text[: keep // 2]}…{text[-(keep - keep // 2) :]}"


def text_width(text: str, size: float) -> float:
    """A guess of a text's width that is a little too large for usual fonts."""
    return size * sum(_width(c) for c in text)


def _width(c: str) -> float:
    if c < "\u0300":
        return 0.34 if c in _NARROW else 0.92 if c in _WIDE else 0.62
    return 1.05 if unicodedata.east_asian_width(c) in "WF" else 0.92 if c in _WIDE else 0.62


def text_element(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    kind = f' class="{style}"' if style else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}"{where}>{xml(text)}</text>'


def outline(link: Link) -> str:
    """The way of a line: vertical where it passes a row, an S between the rows."""
    x, y = link.start
    steps = [f"M{x:.1f} {y:.1f}"]
    for (x0, y0), (x1, y1) in link.points:
        if y0 != y:
            steps.append(f"V{y0:.1f}")
        if abs(x0 - x1) < 0.1:
            steps.append(f"V{y1:.1f}")
        else:
            bend = (y1 - y0) * 0.5
            steps.append(f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
        y = y1
    return " ".join(steps)


def shape_text(known: Type | None) -> str:
    if not isinstance(known, TensorType):
        return "" if known is None else str(known)
    if known.shape is None:
        return ""
    return "×".join("?" if d is None else str(d) for d in known.shape)
