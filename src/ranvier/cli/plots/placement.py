"""Where a model runs, as a picture: nodes in the colour and with the mark of their provider, parts as frames around
them, transfers on the lines between.

Every part is laid out for itself and is then one box among the others, so that frames never overlap; values that enter
or leave a part stand at its upper and lower edge. A mark beside the colour says the same to those who see few colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ranvier.charts.canvas import PALETTE
from ranvier.cli.plots.placement_text import (
    Costs,
    Data,
    count,
    listed,
    node_text,
    part_text,
    part_title,
    transfer_size,
    transfer_text,
    transfer_title,
)
from ranvier.cli.render import seconds_text
from ranvier.graph.layout import Box, Link, Spacing, place, rows_of
from ranvier.graph.svg import FONT, NAMESPACE, attribute, one_line, outline, short, text_element, text_width, xml
from ranvier.records import dataclass

HOST = "cpu"  # the memory that graph inputs and outputs are in
DENSE_FROM = 150  # nodes; beyond this a box shows its operator alone, and the rest is under the pointer
_MOST_PASSING = 120_000  # rows that lines may pass in all; beyond this the longest lines go straight across
_MARGIN, _HEADER, _FRAME_TOP, _FRAME_SIDE = 24.0, 24.0, 30.0, 14.0
# in a square of 10; as many as there are colours
_MARKS = (
    "M5 0.5a4.5 4.5 0 1 0 0.01 0z",
    "M0.8 0.8h8.4v8.4h-8.4z",
    "M5 0.3L9.8 9.2H0.2z",
    "M5 0L10 5L5 10L0 5z",
    "M3.4 0h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
    "M5 9.7L9.8 0.8H0.2z",
    "M0 3h10v4h-10z",
    "M3 0h4v10h-4z",
    "M2.5 0.5h5L10 5L7.5 9.5h-5L0 5z",
)
_ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0.8 L8 4 L0 7.2 z"/></marker>'
    for name in ("tip", "moving-tip")
)
_LIGHT = {"paper": "#ffffff", "ink": "#1f2937", "faint": "#4b5563", "line": "#9ca3af", "pale": "#eef1f5"}
_DARK = {"paper": "#14171c", "ink": "#e5e7eb", "faint": "#a8b0bd", "line": "#6b7480", "pale": "#2a303a"}


def _colours(of: Mapping[str, str]) -> str:
    return f"""
  .paper {{ fill: {of["paper"]}; }}
  text {{ fill: {of["ink"]}; }}
  .minor {{ fill: {of["faint"]}; }}
  .card {{ fill: {of["paper"]}; }}
  .pill {{ fill: {of["pale"]}; stroke: {of["line"]}; }}
  .line {{ stroke: {of["line"]}; }}
  .tip {{ fill: {of["line"]}; }}
  .move rect {{ fill: {of["paper"]}; stroke: {of["ink"]}; }}
  .line.moving {{ stroke: {of["ink"]}; }}
  .moving-tip {{ fill: {of["ink"]}; }}
  .label {{ fill: {of["faint"]}; stroke: {of["paper"]}; }}
"""


STYLE = f"""
  text {{ font: 11px {FONT}; }}
  .op {{ font-size: 12px; font-weight: 600; }}
  .minor {{ font-size: 10px; }}
  .end text, .frame-title {{ font-weight: 600; }}
  .title {{ font-size: 15px; font-weight: 600; }}
  .line {{ fill: none; stroke-width: 1.2; }}
  .line.moving {{ stroke-width: 2.4; stroke-dasharray: 7 3; }}
  .line.across {{ stroke-dasharray: 1 4; }}
  .move rect {{ stroke-width: 1.6; stroke-dasharray: 7 3; }}
  .move .way {{ font-weight: 600; }}
  .label {{ font-size: 9.5px; stroke-width: 3px; paint-order: stroke; }}
{_colours(_LIGHT)}
  .on-dark {{ fill: #ffffff; }}
  .on-light {{ fill: #000000; }}
  @media (prefers-color-scheme: dark) {{ {_colours(_DARK)} }}
"""


@dataclass(frozen=True)
class Look:
    """How a provider is told from others."""

    colour: str
    mark: str
    ink: str  # of texts on the colour

    @property
    def style(self) -> str:
        return "on-dark" if self.ink == "#ffffff" else "on-light"


@dataclass(frozen=True)
class _Piece:
    """A piece of SVG with its size; its origin is its upper left corner."""

    svg: str
    width: float
    height: float


def looks(data: Data) -> dict[str, Look]:
    """Every provider's colour and mark, by the order in which they were asked."""
    used = dict.fromkeys(node["provider"] for node in data["nodes"])
    order = dict.fromkeys([*(name for name in data.get("providers", ()) if name in used), *used])
    found: dict[str, Look] = {}
    for k, name in enumerate(order):
        again, colour = divmod(k, len(PALETTE))  # beyond the last colour they begin anew, with other marks
        found[name] = Look(PALETTE[colour], _MARKS[(colour + again) % len(_MARKS)], _ink(PALETTE[colour]))
    return found


def draw(data: Data, title: str = "") -> str:
    """The picture of a report's data as an SVG document."""
    painter = _Painter(data)
    whole = painter.everything()
    heading, top, least = painter.heading(title or data.get("model", ""))
    width = max(whole.width, least) + 2 * _MARGIN
    height = whole.height + top + 2 * _MARGIN
    left = (width - whole.width) / 2
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.1f} {height:.1f}"'
    return "\n".join(
        [
            f'<svg xmlns="{NAMESPACE}" {size}>',
            f"<style>{STYLE}</style>",
            f"<defs>{_ARROWS}</defs>",
            '<rect class="paper" width="100%" height="100%"/>',
            f'<g transform="translate({_MARGIN:g} {_MARGIN:g})">{heading}</g>',
            f'<g transform="translate({left:.1f} {_MARGIN + top:.1f})">',
            whole.svg,
            "</g>",
            "</svg>",
            "",
        ]
    )


class _Painter:
    def __init__(self, data: Data) -> None:
        self.data = data
        self.nodes: Sequence[Data] = data["nodes"]
        self.parts: Sequence[Data] = data["parts"]
        self.costs = Costs(data)
        self.looks = looks(data)
        self.dense = len(self.nodes) > DENSE_FROM
        self.inputs: Mapping[str, str] = data.get("inputs", {})
        self.outputs: Mapping[str, str] = data.get("outputs", {})
        self.types = {name: kind for n in self.nodes for name, kind in zip(n["outputs"], n["types"])} | {**self.inputs}
        self.made_by = {name: p for p, part in enumerate(self.parts) for name in part["outputs"]}
        self.readers: dict[str, list[int]] = {}
        for p, part in enumerate(self.parts):
            for name in part["inputs"]:
                self.readers.setdefault(name, []).append(p)

    # -- the whole --------------------------------------------------------------------------------------------------

    def everything(self) -> _Piece:
        """Parts, transfers, and those inputs and outputs that do not stand inside a part."""
        pieces: list[_Piece] = []
        made: dict[str, tuple[int, str]] = {}  # the piece a value comes from, and the memory it is in there
        brought: dict[tuple[str, str], int] = {}  # (value, memory) -> the transfer that brings it
        for name in self.inputs:
            if not (self._alone(name) and name not in self.outputs):
                made[name] = (len(pieces), HOST)
                pieces.append(self._end(name, "input"))
        first_part = len(pieces)
        for p, part in enumerate(self.parts):
            made.update({name: (len(pieces), part["memory"]) for name in part["outputs"]})
            pieces.append(self._part(p))
        first_move = len(pieces)
        transfers = self.data.get("transfers", ())
        for transfer in transfers:
            brought.update({(name, transfer["target"]): len(pieces) for name in transfer["values"]})
            pieces.append(self._transfer(transfer))
        ways: dict[tuple[int, int], list[str]] = {}

        def connect(name: str, memory: str, target: int) -> None:
            if name not in made:
                return
            source, at = made[name]
            if at != memory:
                source = brought.get((name, memory), source)
            ways.setdefault((source, target), []).append(name)

        for p, part in enumerate(self.parts):
            for name in part["inputs"]:
                connect(name, part["memory"], first_part + p)
        for k, transfer in enumerate(transfers):
            for name in transfer["values"]:
                connect(name, transfer["source"], first_move + k)
        for name in self.outputs:
            if not self._ends_inside(name):
                connect(name, HOST, len(pieces))
                pieces.append(self._end(name, "output"))
        links = [Link(a, b, k) for k, (a, b) in enumerate(ways)]
        moves = range(first_move, first_move + len(transfers))
        moving = {k for k, ends in enumerate(ways) if ends[0] in moves or ends[1] in moves}
        labels = [self._way_label(names) for names in ways.values()]
        return self._assemble(pieces, links, labels, moving)

    def _alone(self, name: str) -> bool:
        """Is an input read by one part alone, in the host's memory? Then it stands at the edge of that part."""
        readers = self.readers.get(name, ())
        return len(readers) == 1 and self._roomy(readers[0]) and self.parts[readers[0]]["memory"] == HOST

    def _ends_inside(self, name: str) -> bool:
        p = self.made_by.get(name)
        return p is not None and self._roomy(p) and self.parts[p]["memory"] == HOST

    def _roomy(self, p: int) -> bool:
        """Parts of one node have no edge to put values on: lines go straight to them."""
        return len(self.parts[p]["nodes"]) > 1

    def _way_label(self, names: Sequence[str]) -> str:
        return _shape(self.types.get(names[0], "")) if len(names) == 1 else count(len(names), "value")

    def _assemble(
        self, pieces: Sequence[_Piece], links: Sequence[Link], labels: Sequence[str], moving: Iterable[int] = ()
    ) -> _Piece:
        if not pieces:
            return _Piece("", 0.0, 0.0)
        boxes = [Box(piece.width, piece.height) for piece in pieces]
        for link in links:
            boxes[link.source].label = max(boxes[link.source].label, text_width(labels[link.bundle], 9.5) + 6)
        routed, across = _affordable(len(boxes), links)
        width, height = place(boxes, routed, Spacing(16.0, 30.0) if self.dense else Spacing(24.0, 40.0))
        marked = set(moving)
        parts = [_line(link, moving=link.bundle in marked) for link in routed]
        parts += [_straight(boxes[link.source], boxes[link.target]) for link in across]
        parts += _labels(routed, labels)
        for box, piece in zip(boxes, pieces):
            parts.append(f'<g transform="translate({box.x - piece.width / 2:.1f} {box.y:.1f})">{piece.svg}</g>')
        return _Piece("\n".join(parts), width, height)

    # -- one part ---------------------------------------------------------------------------------------------------

    def _part(self, p: int) -> _Piece:
        part = self.parts[p]
        look = self.looks[part["provider"]]
        inner = self._inside(p)
        title = part_title(self.data, p, self.costs)
        width = max(inner.width, text_width(title, 11) * 1.08 + 18) + 2 * _FRAME_SIDE
        height = inner.height + _FRAME_TOP + _FRAME_SIDE
        frame = (
            f'<rect class="frame" width="{width:.1f}" height="{height:.1f}" rx="8" fill="{look.colour}" '
            f'fill-opacity="0.08" stroke="{look.colour}" stroke-width="1.6"/>'
        )
        mark = f'<path transform="translate(12 8)" fill="{look.colour}" d="{look.mark}"/>'
        label = text_element(28, 17, one_line(title), "frame-title", "start")
        x = (width - inner.width) / 2
        return _Piece(
            f'<g class="part" id="p{p}" data-provider={attribute(part["provider"])}>'
            f"<title>{xml(part_text(self.data, p, self.costs))}</title>{frame}{mark}{label}"
            f'<g transform="translate({x:.1f} {_FRAME_TOP:g})">{inner.svg}</g></g>',
            width,
            height,
        )

    def _inside(self, p: int) -> _Piece:
        part = self.parts[p]
        pieces: list[_Piece] = []
        homes: dict[str, int] = {}
        if self._roomy(p):
            for name in part["inputs"]:
                homes[name] = len(pieces)
                pieces.append(self._end(name, "input" if name in self.inputs and self._alone(name) else "from outside"))
        at = {}
        for k in part["nodes"]:
            at[k] = len(pieces)
            homes.update(dict.fromkeys(self.nodes[k]["outputs"], len(pieces)))
            pieces.append(self._node(k))
        links: list[Link] = []
        bundles: dict[str, int] = {}

        def connect(name: str, target: int) -> None:
            source = homes.get(name)
            if source is not None:
                links.append(Link(source, target, bundles.setdefault(name, len(bundles))))

        for k in part["nodes"]:
            for name in self.nodes[k]["inputs"]:
                connect(name, at[k])
        if self._roomy(p):
            for name in part["outputs"]:
                connect(name, len(pieces))
                pieces.append(self._end(name, "output" if name in self.outputs else "to others"))
        labels = ["" if self.dense else _shape(self.types.get(name, "")) for name in bundles]
        return self._assemble(pieces, links, labels)

    def _node(self, k: int) -> _Piece:
        node = self.nodes[k]
        look = self.looks[node["provider"]]
        op = short(one_line(node["op"]), 40)
        seconds = self.costs.node(k)
        lines = [] if self.dense else [short(one_line(node["name"]), 30)]
        if seconds is not None and not self.dense:
            lines.append(seconds_text(seconds))
        lines = [line for line in lines if line]
        width = max(text_width(op, 12) * 1.1 + 36, *(text_width(line, 10) + 20 for line in lines), 72.0)
        height = _HEADER + (15 * len(lines) + 6 if lines else 0)
        card = f'<rect class="card" width="{width:.1f}" height="{height:.1f}" rx="5" stroke="{look.colour}"/>'
        parts = [
            f'<g class="node" id="n{k}" data-provider={attribute(node["provider"])}>',
            f"<title>{xml(node_text(self.data, k, self.costs))}</title>",
            card if lines else "",
            f'<rect class="head" width="{width:.1f}" height="{_HEADER:g}" rx="5" fill="{look.colour}"/>',
            f'<path class="mark" transform="translate(8 7)" fill="{look.ink}" d="{look.mark}"/>',
            text_element(width / 2 + 8, 16.5, op, f"op {look.style}"),
        ]
        parts += [text_element(width / 2, _HEADER + 13 + 15 * i, line, "minor") for i, line in enumerate(lines)]
        return _Piece("".join([*parts, "</g>"]), width, height)

    # -- what stands between parts ----------------------------------------------------------------------------------

    def _end(self, name: str, kind: str) -> _Piece:
        label = short(one_line(name), 36)
        width = max(text_width(label, 11) * 1.08 + 26, 60.0)
        said = xml(f"{kind} {name}: {self.types.get(name) or self.outputs.get(name, '')}")
        dashes = "" if kind in ("input", "output") else ' stroke-dasharray="3 2"'
        pill = f'<rect class="pill" width="{width:.1f}" height="24" rx="12"{dashes}/>'
        svg = f'<g class="end"><title>{said}</title>{pill}{text_element(width / 2, 16, label)}</g>'
        return _Piece(svg, width, 24.0)

    def _transfer(self, transfer: Data) -> _Piece:
        first = f"⇄ {transfer_title(transfer)}"
        second = (
            f"{short(one_line(transfer_size(transfer)), 40)} · {short(one_line(listed(transfer['values'], 2)), 40)}"
        )
        width = max(text_width(first, 11) * 1.08, text_width(second, 10)) + 24
        said = xml(transfer_text(transfer, self.costs))
        box = f'<rect width="{width:.1f}" height="38" rx="3"/>'
        texts = text_element(width / 2, 16, one_line(first), "way") + text_element(width / 2, 30, second, "minor")
        return _Piece(f'<g class="move"><title>{said}</title>{box}{texts}</g>', width, 38.0)

    def heading(self, title: str) -> tuple[str, float, float]:
        """The title and the legend, the height of both, and the width they need."""
        name = short(one_line(title), 80)
        parts = [text_element(0, 14, name, "title", "start")]
        about = count(len(self.nodes), "node") + " in " + count(len(self.parts), "part")
        transfers = self.data.get("transfers", ())
        if transfers:
            known = [t["bytes"] for t in transfers if t.get("bytes") is not None]
            size = f" of {transfer_size({'bytes': sum(known)})}" if len(known) == len(transfers) else ""
            about += f", {count(len(transfers), 'transfer')}{size} a run"
        if predicted := self.costs.summary(self.looks):
            about += f", {predicted}"
        parts.append(text_element(0, 31, about, "minor", "start"))
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node["provider"]] = counts.get(node["provider"], 0) + 1
        widest = max(text_width(name, 15), text_width(about, 10))
        y = 44.0
        for who, look in self.looks.items():
            label = f"{who}: {count(counts[who], 'node')}"
            parts.append(
                f'<g class="legend" data-provider={attribute(who)}>'
                f'<rect x="0" y="{y:g}" width="22" height="14" rx="3" fill="{look.colour}"/>'
                f'<path transform="translate(6 {y + 2:g})" fill="{look.ink}" d="{look.mark}"/>'
                f"{text_element(30, y + 11, one_line(label), '', 'start')}</g>"
            )
            widest = max(widest, text_width(label, 11) + 30)
            y += 19
        if transfers:
            parts.append(f'<path class="line moving" d="M0 {y + 7:g} H22"/>')
            parts.append(text_element(30, y + 11, "moves from one memory to another", "", "start"))
            y += 19
        return "".join(parts), y + 14, widest


def _affordable(boxes: int, links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
    """The links to route around boxes, and the longest ones where all together would pass too many rows."""
    rows = rows_of(boxes, links)
    spans: dict[int, int] = {}
    for link in links:
        spans[link.bundle] = max(spans.get(link.bundle, 0), rows[link.target] - rows[link.source])
    if sum(spans.values()) <= _MOST_PASSING:
        return list(links), []
    left, kept = _MOST_PASSING, set()
    for bundle, span in sorted(spans.items(), key=lambda item: item[1]):
        left -= span
        if left < 0:
            break
        kept.add(bundle)
    return [k for k in links if k.bundle in kept], [k for k in links if k.bundle not in kept]


def _line(link: Link, *, moving: bool) -> str:
    kind, tip = ("line moving", "moving-tip") if moving else ("line", "tip")
    return f'<path class="{kind}" marker-end="url(#{tip})" d="{outline(link)}"/>'


def _straight(source: Box, target: Box) -> str:
    bottom = source.y + source.height
    return f'<path class="line across" d="M{source.x:.1f} {bottom:.1f} L{target.x:.1f} {target.y:.1f}"/>'


def _labels(links: Sequence[Link], labels: Sequence[str]) -> list[str]:
    """What the lines carry, once for each box they leave and below each other."""
    found: dict[int, list[Link]] = {}
    for link in links:
        found.setdefault(link.source, []).append(link)
    parts: list[str] = []
    for leaving in found.values():
        x, y = leaving[0].start
        texts = dict.fromkeys(labels[link.bundle] for link in leaving if labels[link.bundle])
        parts += [text_element(x + 5, y + 11 + 10 * k, text, "label", "start") for k, text in enumerate(texts)]
    return parts


def _shape(kind: str) -> str:
    """``float32[4, 32]`` in the words of a picture: ``4×32``; as it is where it is no tensor."""
    if not kind or kind == "None":
        return ""
    _, bracket, dims = kind.partition("[")
    return short(one_line(dims.rstrip("]").replace(", ", "×") if bracket else kind), 30)


def _ink(colour: str) -> str:
    """Black or white, whichever is read better on a colour."""
    red, green, blue = (_linear(int(colour[k : k + 2], 16) / 255) for k in (1, 3, 5))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (light + 0.05) >= (light + 0.05) / 0.05 else "#000000"


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


__all__ = ["DENSE_FROM", "STYLE", "Look", "draw", "looks"]
