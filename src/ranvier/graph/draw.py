"""A graph as a picture: ``draw_svg(graph)`` is an SVG document that any browser shows.

Nodes are boxes in the colour of their operator's family, with their constants inside; lines carry the shape of the
value; bodies of control flow are drawn inside their node. Everything there is to know of a node is in its tooltip.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.graph.families import Family, family_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.layout import Box, Link, Spacing, place
from ranvier.graph.svg import FONT, NAMESPACE, outline, shape_text, short, text_element, text_width, xml
from ranvier.graph.text import constant_text, node_text
from ranvier.graph.types import Type
from ranvier.records import dataclass

Types = Mapping[Value, Type | None]

DENSE_FROM = 150  # nodes; beyond this a box shows its operator alone, and the rest is in the tooltip
_MARGIN = 24.0
_HEADER = 24.0
_LINE = 15.0

_ARROW = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0.8 L8 4 L0 7.2 z" fill="#9ca3af"/></marker>'
)
_STYLE = f"""
  text {{ font: 11px {FONT}; fill: #374151; }}
  .op {{ font-size: 12px; font-weight: 600; fill: #fff; }}
  .minor {{ font-size: 10px; fill: #6b7280; }}
  .end text {{ font-weight: 600; }}
  .title {{ font-size: 15px; font-weight: 600; fill: #111827; }}
  .line {{ fill: none; stroke: #9ca3af; stroke-width: 1.2; }}
  .shape {{ font-size: 9.5px; fill: #4b5563; stroke: #fff; stroke-width: 3px; paint-order: stroke; }}
  .body {{ fill: #fafbfc; stroke: #6b7280; stroke-dasharray: 4 3; }}
"""


def draw_svg(graph: Graph, *, title: str = "", types: Types | None = None) -> str:
    """The picture of ``graph``. ``types`` may know more of the values than the graph itself (sizes bound by a call)."""
    painter = _Painter(types or {}, dense=sum(1 for _ in graph.all_nodes()) > DENSE_FROM)
    drawing = painter.graph(graph)
    inner = max(drawing.width, text_width(title or graph.name, 15), _LEGEND_COLUMN * 2)
    heading, top = _heading(title or graph.name, painter.families, columns=min(int(inner / _LEGEND_COLUMN), 6))
    width = inner + 2 * _MARGIN
    height = drawing.height + top + 2 * _MARGIN
    left = (width - drawing.width) / 2
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.1f} {height:.1f}"'
    return "\n".join(
        [
            f'<svg xmlns="{NAMESPACE}" {size}>',
            f"<style>{_STYLE}</style>",
            f"<defs>{_ARROW}</defs>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<g transform="translate({_MARGIN:g} {_MARGIN:g})">{heading}</g>',
            f'<g transform="translate({left:.1f} {_MARGIN + top:.1f})">',
            drawing.svg,
            "</g>",
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class _Drawing:
    """A piece of SVG with its size; its origin is its upper left corner."""

    svg: str
    width: float
    height: float


class _Painter:
    def __init__(self, types: Types, *, dense: bool) -> None:
        self.types = types
        self.dense = dense
        self.families: dict[Family, None] = {}  # in order of appearance

    def graph(self, graph: Graph) -> _Drawing:
        """Inputs at the top, then the nodes, outputs at the bottom."""
        pieces: list[_Drawing] = []
        homes: dict[Value, int] = {}  # the box a value comes from
        for value in graph.inputs:
            homes[value] = len(pieces)
            pieces.append(self._end(value, "input"))
        for value in graph.captured():
            if value.const is not None:
                continue  # constants stand inside their users, wherever they are defined
            homes[value] = len(pieces)
            pieces.append(self._end(value, "from outside"))
        at = {}
        for node in graph:
            at[id(node)] = len(pieces)
            homes.update(dict.fromkeys(node.outputs, len(pieces)))
            pieces.append(self._node(node))
        links: list[Link] = []
        bundles: dict[Value, int] = {}

        def connect(value: Value, target: int) -> None:
            source = homes.get(value)
            if source is not None:
                links.append(Link(source, target, bundles.setdefault(value, len(bundles))))

        for node in graph:
            for value in dict.fromkeys(node.dependencies()):
                connect(value, at[id(node)])
        for value in graph.outputs:
            connect(value, len(pieces))
            pieces.append(self._end(value, "output"))
        return self._assemble(pieces, links, bundles)

    def _assemble(self, pieces: list[_Drawing], links: list[Link], bundles: Mapping[Value, int]) -> _Drawing:
        shapes = {bundle: self._shape(value) for value, bundle in bundles.items()}
        boxes = [Box(piece.width, piece.height) for piece in pieces]
        for link in links:
            label = text_width(shapes[link.bundle], 9.5) + 6
            boxes[link.source].label = max(boxes[link.source].label, label)
        width, height = place(boxes, links, Spacing(16.0, 30.0) if self.dense else Spacing(24.0, 40.0))
        parts = [_path(link) for link in links]
        for values in _first_links(links):
            # the values of one node share the place where its lines begin: their labels stand below each other
            labels = list(dict.fromkeys(filter(None, (shapes[link.bundle] for link in values))))
            x, y = values[0].start
            parts.extend(
                text_element(x + 5, y + 11 + 10 * k, label, "shape", "start") for k, label in enumerate(labels)
            )
        for box, piece in zip(boxes, pieces):
            parts.append(f'<g transform="translate({box.x - piece.width / 2:.1f} {box.y:.1f})">{piece.svg}</g>')
        return _Drawing("\n".join(parts), width, height)

    def _shape(self, value: Value) -> str:
        return short(shape_text(self.types.get(value) or value.type), 30)

    def _end(self, value: Value, kind: str) -> _Drawing:
        """A rounded box for where a value enters or leaves the graph."""
        name = short(value.name, 36)
        known = self.types.get(value) or value.type
        width = max(text_width(name, 11) * 1.08 + 26, 60.0)
        tooltip = f"<title>{xml(f'{kind} {value.name}: {known}')}</title>"
        shape = f'<rect width="{width:.1f}" height="24" rx="12" fill="#eef1f5" stroke="#c3cad4"/>'
        return _Drawing(f'<g class="end">{tooltip}{shape}{text_element(width / 2, 16, name)}</g>', width, 24.0)

    def _node(self, node: Node) -> _Drawing:
        family = family_of(node)
        self.families[family] = None
        lines = [] if self.dense else [line for line in (short(node.name, 30), _constants(node)) if line]
        bodies = [self._body(name, body) for name, body in _named_bodies(node)]
        inner_width = sum(b.width for b in bodies) + 12.0 * (len(bodies) + 1) if bodies else 0.0
        inner_height = max((b.height for b in bodies), default=-8.0) + 8.0
        widest = max([text_width(node.op, 12) * 1.1, *(text_width(line, 10) for line in lines)])
        width = max(widest + 24, inner_width, 72.0 if self.dense else 90.0)
        height = _HEADER + (len(lines) * _LINE + 6 if lines else 0.0) + (inner_height + 4 if bodies else 0.0)
        parts = [
            f'<g class="node"><title>{xml(_tooltip(node))}</title>',
            f'<rect width="{width:.1f}" height="{height:.1f}" rx="5" fill="#fff" stroke="{family.colour}"/>',
            _header(width, height, family.colour),
            text_element(width / 2, 16.5, node.op, "op"),
        ]
        y = _HEADER + 13
        for line in lines:
            parts.append(text_element(width / 2, y, line, "minor"))
            y += _LINE
        x = (width - inner_width) / 2 + 12.0
        for body in bodies:
            parts.append(f'<g transform="translate({x:.1f} {height - inner_height:.1f})">{body.svg}</g>')
            x += body.width + 12.0
        parts.append("</g>")
        return _Drawing("".join(parts), width, height)

    def _body(self, name: str, graph: Graph) -> _Drawing:
        inner = self.graph(graph)
        width = max(inner.width, text_width(name, 10)) + 28
        height = inner.height + 42
        x = (width - inner.width) / 2
        frame = f'<rect class="body" width="{width:.1f}" height="{height:.1f}" rx="4"/>'
        label = text_element(10, 15, name, "minor", anchor="start")
        return _Drawing(f'{frame}{label}<g transform="translate({x:.1f} 28)">{inner.svg}</g>', width, height)


def _first_links(links: list[Link]) -> list[list[Link]]:
    """One link per value, together for each box they leave."""
    seen: set[int] = set()
    found: dict[int, list[Link]] = {}
    for link in links:
        if link.bundle not in seen:
            seen.add(link.bundle)
            found.setdefault(link.source, []).append(link)
    return list(found.values())


def _named_bodies(node: Node) -> list[tuple[str, Graph]]:
    found: list[tuple[str, Graph]] = []
    for key, attr in node.attrs.items():
        if isinstance(attr, Graph):
            found.append((key, attr))
        elif isinstance(attr, list | tuple) and attr and isinstance(attr[0], Graph):
            found.extend((f"{key}[{k}]", body) for k, body in enumerate(attr))
    return found


def _constants(node: Node) -> str:
    """The constant operands: small ones by value, others by shape."""
    found = []
    for value in node.inputs:
        if value is None or value.const is None:
            continue
        if value.const.size <= 4 and value.const.is_loaded and value.const.numpy().dtype != object:
            text = ", ".join(_number(n) for n in value.const.numpy().ravel().tolist())
            found.append(f"[{text}]" if value.const.shape else text)
        else:
            found.append(shape_text(value.const.type) or "scalar")
    return short("  ·  ".join(found), 44)


def _number(n: object) -> str:
    """Short; the largest integers stand for "to the end" in slices."""
    if isinstance(n, int) and abs(n) >= 2**31 - 1:
        return "∞" if n > 0 else "−∞"
    return f"{n:g}" if isinstance(n, float) else str(n)


def _tooltip(node: Node) -> str:
    """The node as text without its bodies, and its constants."""
    lines = [node_text(node).splitlines()[0]]
    lines.extend(f"%{v.name} = {constant_text(v)}" for v in node.inputs if v is not None and v.const is not None)
    return "\n".join([f"{node.op} {node.name}", *lines])


_LEGEND_COLUMN = 165.0


def _heading(title: str, families: Mapping[Family, None], columns: int) -> tuple[str, float]:
    parts = [text_element(0, 14, short(title, 80), "title", anchor="start")]
    for k, family in enumerate(families):
        x, y = k % columns * _LEGEND_COLUMN, 30 + k // columns * 17
        parts.append(f'<rect x="{x:g}" y="{y}" width="11" height="11" rx="2" fill="{family.colour}"/>')
        parts.append(text_element(x + 17, y + 9.5, family.name, "minor", anchor="start"))
    return "".join(parts), 50.0 + 17 * -(-len(families) // columns)


def _header(width: float, height: float, colour: str) -> str:
    """The coloured top of a node: rounded above, and below too where nothing follows."""
    if height <= _HEADER:
        return f'<rect width="{width:.1f}" height="{height:.1f}" rx="5" fill="{colour}"/>'
    outline = f"M0 {_HEADER:g} V5 Q0 0 5 0 H{width - 5:.1f} Q{width:.1f} 0 {width:.1f} 5 V{_HEADER:g} z"
    return f'<path d="{outline}" fill="{colour}"/>'


def _path(link: Link) -> str:
    return f'<path class="line" marker-end="url(#tip)" d="{outline(link)}"/>'
