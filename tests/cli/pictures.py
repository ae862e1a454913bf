"""Reading pictures back: elements of an SVG by class with the place they have on the page, and a strict HTML reader."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

SVG = "{http://www.w3.org/2000/svg}"
_VOID = {"meta", "input", "br", "link"}


@dataclass
class Found:
    """One element: its place on the page, and its own tooltip."""

    element: ET.Element
    x: float
    y: float

    @property
    def classes(self) -> list[str]:
        return self.element.get("class", "").split()

    @property
    def title(self) -> str:
        found = self.element.find(f"{SVG}title")
        return "" if found is None else found.text or ""

    @property
    def texts(self) -> list[str]:
        return [t.text or "" for t in self.element.findall(f"{SVG}text")]

    @property
    def rects(self) -> list[ET.Element]:
        return self.element.findall(f"{SVG}rect")

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of its outermost rectangle."""
        sizes = [(float(r.get("width", 0)), float(r.get("height", 0))) for r in self.rects]
        return self.x, self.y, self.x + max(w for w, _ in sizes), self.y + max(h for _, h in sizes)


def walk(root: ET.Element, x: float = 0.0, y: float = 0.0) -> Iterator[Found]:
    shift = re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", root.get("transform", ""))
    if shift:
        x, y = x + float(shift[1]), y + float(shift[2])
    yield Found(root, x, y)
    for child in root:
        yield from walk(child, x, y)


def of_class(svg: str, name: str) -> list[Found]:
    return [found for found in walk(ET.fromstring(svg)) if name in found.classes]


def ends(line: Found) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where a line begins and where it arrives."""
    steps = re.findall(r"([MVCL])([^MVCL]*)", line.element.get("d", ""))
    x, y = first = tuple(map(float, steps[0][1].split()))
    for step, numbers in steps[1:]:
        values = [float(n) for n in numbers.split()]
        x, y = (x, values[0]) if step == "V" else (values[-2], values[-1])
    return (first[0] + line.x, first[1] + line.y), (x + line.x, y + line.y)


def overlaps(boxes: list[tuple[float, float, float, float]]) -> list[tuple[object, object]]:
    """Pairs that cover common ground."""
    found: list[tuple[object, object]] = []
    active: list[tuple[float, float, float, float]] = []
    for box in sorted(boxes, key=lambda b: b[1]):
        active = [other for other in active if other[3] > box[1] + 0.2]
        found += [(other, box) for other in active if other[0] < box[2] - 0.2 and box[0] < other[2] - 0.2]
        active.append(box)
    return found


@dataclass
class Element:
    tag: str
    attrs: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        own = [self] if self.tag == tag else []
        return own + [found for child in self.children for found in child.all(tag)]

    @property
    def whole_text(self) -> str:
        return self.text + "".join(child.whole_text for child in self.children)


class _Reader(HTMLParser):
    """Refuses what a browser would have to guess about: tags that are not closed, or in the wrong order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, dict(attrs))
        self.open[-1].children.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def read_html(text: str) -> Element:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is not closed"
    return reader.root
