"""The layout and the picture, without the command around them."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from ranvier.dtypes import DType
from ranvier.graph.draw import draw_svg
from ranvier.graph.families import CONTROL, OTHER, QUANTIZATION, family_of
from ranvier.graph.ir import Graph, Node
from ranvier.graph.layout import Box, Link, Spacing, place
from ranvier.graph.types import TensorType


def boxes(count: int) -> list[Box]:
    return [Box(80, 30) for _ in range(count)]


def overlapping(placed: list[Box]) -> list[tuple[Box, Box]]:
    return [
        (a, b)
        for k, a in enumerate(placed)
        for b in placed[k + 1 :]
        if abs(a.x - b.x) < (a.width + b.width) / 2 - 1e-6 and a.y < b.y + b.height and b.y < a.y + a.height
    ]


def test_a_chain_is_straight():
    placed = boxes(5)
    links = [Link(k, k + 1, k) for k in range(4)]
    width, height = place(placed, links)
    assert len({b.x for b in placed}) == 1
    assert [b.y for b in placed] == sorted(b.y for b in placed)
    assert width == 80 and height == pytest.approx(5 * 30 + 4 * Spacing().row)


def test_rows_follow_the_links_and_boxes_do_not_overlap():
    rng = random.Random(5)
    count = 120
    links = [
        Link(rng.randrange(max(0, k - 9), k), k, bundle) for bundle, k in enumerate(range(1, count)) for _ in range(2)
    ]
    placed = [Box(rng.uniform(40, 160), rng.uniform(20, 60), rng.uniform(0, 60)) for _ in range(count)]
    width, height = place(placed, links)
    assert not overlapping(placed)
    for link in links:
        assert placed[link.source].y + placed[link.source].height < placed[link.target].y
        assert link.start == (placed[link.source].x, placed[link.source].y + placed[link.source].height)
        assert link.points[-1][1][1] == placed[link.target].y
    assert all(b.x - b.width / 2 + 1e-6 >= 0 and b.x + b.width / 2 <= width + 1e-6 for b in placed)
    assert max(b.y + b.height for b in placed) <= height + 1e-6


def test_crossings_are_avoided():
    # two pairs, given crosswise: the order within the rows must be changed
    placed = boxes(4)
    place(placed, [Link(0, 3, 0), Link(1, 2, 1)])
    assert (placed[0].x < placed[1].x) == (placed[3].x < placed[2].x)


def test_the_trunk_stays_straight_beside_a_shortcut():
    placed = boxes(6)
    links = [Link(k, k + 1, k) for k in range(5)] + [Link(0, 5, 0)]
    place(placed, links)
    assert len({round(b.x, 6) for b in placed}) == 1
    shortcut = links[-1]
    middle = shortcut.points[2][0][0]
    assert abs(middle - placed[2].x) > placed[2].width / 2  # it passes beside the boxes


def test_a_cycle_is_refused():
    with pytest.raises(ValueError, match="cycle"):
        place(boxes(2), [Link(0, 1, 0), Link(1, 0, 1)])


def test_nothing_to_place():
    assert place([], []) == (0.0, 0.0)


def chain(length: int, width: int = 1) -> Graph:
    graph = Graph("long")
    values = [graph.add_input("x", TensorType(DType.float32, (1, 8)))]
    for k in range(length):
        node = graph.add(
            "Add" if k % 7 == 0 and k else "Relu", values[-1:] + ([values[-5]] if k % 7 == 0 and k else [])
        )
        node.name = f"node_{k}"
        node.output.type = TensorType(DType.float32, (1, 8))
        values.append(node.output)
    graph.outputs = [values[-1]]
    return graph


def test_a_thousand_nodes_are_all_there():
    graph = chain(1000)
    text = draw_svg(graph)
    root = ET.fromstring(text)
    titles = {(t.text or "").splitlines()[0] for t in root.iter("{http://www.w3.org/2000/svg}title")}
    assert all(f"{node.op} {node.name}" in titles for node in graph)


def test_odd_names_and_no_nodes():
    graph = Graph('<&"\x00>')
    value = graph.add_input("a<b\x01&c")
    graph.outputs = [value]
    root = ET.fromstring(draw_svg(graph, title="</svg>"))
    assert root.tag.endswith("svg")
    ET.fromstring(draw_svg(Graph("empty")))


def test_types_may_be_sharper_than_the_graph_knows():
    graph = chain(2)
    (value,) = graph.inputs
    assert "64×8" in draw_svg(graph, types={value: TensorType(DType.float32, (64, 8))})


def test_families():
    body = Graph("body")
    assert family_of(Node("Anything", [], {"body": body})) is CONTROL
    assert family_of(Node("QLinearConv", [])) is QUANTIZATION
    assert family_of(Node("ReduceMean", [])).name == "pooling and reduction"
    assert family_of(Node("Frobnicate", [])) is OTHER
