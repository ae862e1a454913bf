"""The picture and the page of where a model runs: read back with parsers, not compared as text."""

from __future__ import annotations

import base64
import hashlib
import random
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import pytest

from ranvier.cli.plots import placement, placement_page
from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.types import Symbol, TensorType
from ranvier.runtime.session import Session
from tests.cli.pictures import SVG, Found, ends, of_class, overlaps, read_html, walk
from tests.faults.test_sim import session as split_session

HOSTILE = [
    "<script>alert(1)</script>",
    "\"quotes' & &amp; <b>",
    "two\nlines\tand a tab",
    "</title></svg><img src=x onerror=alert(1)>",
    "]]> --> <!--",
    "\u202eturned\u2066 around",
    "naïve 模型 🚀",
    "nul\x00 and \x07 and \ufffe",
]


@pytest.fixture(scope="module")
def split() -> dict[str, Any]:
    """Relu, MatMul, Tanh, MatMul, Abs: the products on ``sim``, which has a memory of its own."""
    with split_session() as session:
        return session.report.to_dict()


def made_up(nodes: int, cut: int, reach: int) -> dict[str, Any]:
    """A report's data for a random graph, ``cut`` nodes to a part, every node reading one of the last ``reach``."""
    rng = random.Random(nodes + cut)
    providers = ["cpu", "sim", "reference"]
    found: list[dict[str, Any]] = []
    for k in range(nodes):
        reads = sorted({f"v{rng.randrange(max(0, k - reach), k)}" for _ in range(2)}) if k else ["x"]
        op = rng.choice(["MatMul", "Add", "Relu"])
        where = providers[k // cut % 3]
        found.append({"name": f"node_{k}", "op": op, "provider": where, "part": k // cut, "inputs": reads})
        found[-1] |= {"outputs": [f"v{k}"], "types": ["float32[4, 32]"], "declined": [["cpu", "no"]]}
    parts: list[dict[str, Any]] = []
    for start in range(0, nodes, cut):
        inside = list(range(start, min(nodes, start + cut)))
        made = {f"v{k}" for k in inside}
        where = found[start]["provider"]
        parts.append({"provider": where, "memory": "sim:0" if where == "sim" else "cpu", "nodes": inside})
        parts[-1]["inputs"] = sorted({name for k in inside for name in found[k]["inputs"]} - made)
    read = {name for part in parts for name in part["inputs"]} | {f"v{nodes - 1}"}
    for part in parts:
        part["outputs"] = [f"v{k}" for k in part["nodes"] if f"v{k}" in read]
    ends = {"inputs": {"x": "float32[4, 32]"}, "outputs": {f"v{nodes - 1}": "float32[4, 32]"}}
    return {"model": "made up", "providers": providers, "nodes": found, "parts": parts, "transfers": [], **ends}


def check_boxes(svg: str, data: dict[str, Any]) -> None:
    """Every node stands once, inside the frame of its part, and nothing covers anything else."""
    nodes = {found.element.get("id"): found for found in of_class(svg, "node")}
    assert len(of_class(svg, "node")) == len(data["nodes"])
    assert set(nodes) == {f"n{k}" for k in range(len(data["nodes"]))}
    frames = {found.element.get("id"): found.box for found in of_class(svg, "part")}
    assert set(frames) == {f"p{p}" for p in range(len(data["parts"]))}
    for k, node in enumerate(data["nodes"]):
        left, top, right, bottom = frames[f"p{node['part']}"]
        box = nodes[f"n{k}"].box
        assert left < box[0] and top < box[1] and box[2] < right and box[3] < bottom
    assert not overlaps([found.box for found in nodes.values()])
    outer = [*frames.values(), *(found.box for found in of_class(svg, "move"))]
    assert not overlaps(outer)
    assert not overlaps([found.box for name in ("node", "end", "move") for found in of_class(svg, name)])
    _, _, width, height = map(float, ET.fromstring(svg).get("viewBox", "").split())
    assert all(min(b) >= 0 and b[2] <= width and b[3] <= height for b in outer)


def test_nodes_parts_and_colours(split: dict[str, Any]) -> None:
    svg = placement.draw(split)
    check_boxes(svg, split)
    looks = placement.looks(split)
    assert looks["sim"].colour != looks["reference"].colour and looks["sim"].mark != looks["reference"].mark
    for found in of_class(svg, "node"):
        node = split["nodes"][int(found.element.get("id", "")[1:])]
        look = looks[node["provider"]]
        (head,) = (r for r in found.rects if r.get("class") == "head")
        (mark,) = (p for p in found.element.findall(f"{SVG}path") if p.get("class") == "mark")
        assert (head.get("fill"), mark.get("d")) == (look.colour, look.mark)
        assert found.element.get("data-provider") == node["provider"]
        assert found.title.startswith(f"{node['op']} {node['name']}\nruns on {node['provider']}, part {node['part']}")
    legend = {found.element.get("data-provider"): found for found in of_class(svg, "legend")}
    assert set(legend) == {"sim", "reference"}
    for name, found in legend.items():
        assert found.rects[0].get("fill") == looks[name].colour and name in found.texts[0]
    relu = next(found for found in of_class(svg, "node") if found.texts[0] == "Relu")
    assert "declined by sim: this accelerator does not have the operator" in relu.title
    assert "float32[4, 32]" in relu.title


def test_transfers_stand_between_the_parts(split: dict[str, Any]) -> None:
    svg = placement.draw(split)
    moves = of_class(svg, "move")
    assert [found.texts for found in moves] == [
        ["⇄ cpu → sim:0", "512 B · v1"],
        ["⇄ sim:0 → cpu", "512 B · v2"],
        ["⇄ cpu → sim:0", "512 B · v3"],
        ["⇄ sim:0 → cpu", "512 B · v4"],
    ]
    assert "v1: float32[4, 32]" in moves[0].title

    lines = [found for found in of_class(svg, "line") if found.element.get("marker-end")]
    ways = {(_touched(svg, *ends(line)[0], lower=True), _touched(svg, *ends(line)[1])) for line in lines}
    chain = ["x", "p0", "move0", "p1", "move1", "p2", "move2", "p3", "move3", "p4", "y"]
    assert ways == set(pairwise(chain))
    marked = {line.element.get("d") for line in lines if "moving" in line.classes}
    assert len(marked) == 8  # to and from each of four transfers


def _touched(svg: str, x: float, y: float, lower: bool = False) -> str:
    """What a line touches with its end: at the lower edge where it begins, at the upper one where it arrives."""
    named: list[tuple[str, Found]] = [(f"p{k}", f) for k, f in enumerate(of_class(svg, "part"))]
    named += [(f"move{k}", f) for k, f in enumerate(of_class(svg, "move"))]
    named += [(f.texts[0], f) for f in of_class(svg, "end")]
    for name, found in named:
        left, top, right, bottom = found.box
        if left - 0.2 <= x <= right + 0.2 and abs(y - (bottom if lower else top)) < 0.2:
            return name
    return ""


def test_costs_are_drawn_where_they_are_known(split: dict[str, Any]) -> None:
    assert "predicted" not in "".join(found.title for found in of_class(placement.draw(split), "node"))
    cannot = {"provider": "sim", "seconds": None, "transfer": None, "total": None, "reason": "not supported"}
    other = {"provider": "reference", "seconds": 3e-3, "transfer": 0.0, "total": 0.0, "reason": "slower"}
    options = [
        [
            {"provider": n["provider"], "seconds": 12e-6, "transfer": 0.0, "total": 0.0, "reason": "chosen"},
            other if n["provider"] == "sim" else cannot,
        ]
        for n in split["nodes"]
    ]
    move = {"value": "v1", "source": "cpu", "target": "sim:0", "bytes": 512, "seconds": 7e-6}
    parts = [{"provider": "reference", "nodes": [0], "start": 1e-6, "end": 21e-6}]
    costs = {"seconds": 1e-4, "options": options, "transfers": [move], "parts": parts}
    svg = placement.draw({**split, "predicted": costs})
    for found in of_class(svg, "node"):
        assert "predicted 12 µs" in found.title and "12 µs" in found.texts
    matmul = next(found for found in of_class(svg, "node") if found.texts[0] == "MatMul")
    assert "reference would take 3 ms: slower" in matmul.title
    assert "predicted 7 µs" in of_class(svg, "move")[0].title and "predicted" not in of_class(svg, "move")[1].title
    frames = [found.texts[0] for found in of_class(svg, "part")]
    assert frames[:2] == ["part 0 · reference · 1 node · 20 µs", "part 1 · sim · 1 node · 12 µs"]
    cells = [row.whole_text for row in read_html(placement_page.page({**split, "predicted": costs})).all("td")]
    assert "20 µs" in cells and "7 µs" in cells


def hostile_report() -> dict[str, Any]:
    graph = Graph(HOSTILE[0])
    width = Symbol(HOSTILE[0])
    kind = TensorType(DType.float32, (width, 4))
    value = graph.add_input(HOSTILE[1], kind)
    for k, name in enumerate(HOSTILE):
        node = graph.add("Relu" if k % 3 else "Abs", [value], version=13, name=name)
        value = node.output
        value.type = kind
        value.name = f"{name} {k}"
    graph.outputs = [value]
    graph.symbols[width.name] = width
    options = {"sim": {"ops": "Relu", "latency": 0.0}}
    config = SessionConfig(providers=("sim", "reference"), provider_options=options, optimization="none")
    with Session(graph, config) as session:
        data = session.report.to_dict()
    data["nodes"][0]["declined"] = [[HOSTILE[3], HOSTILE[0]]]
    data["declined"] = [
        {"provider": HOSTILE[3], "reason": HOSTILE[0], "count": 1, "operators": HOSTILE, "examples": HOSTILE}
    ]
    data["fallbacks"] = list(HOSTILE)
    return data


def readable(name: str) -> str:
    """What is left of a name in a document: characters that XML does not have are replaced."""
    return re.sub("[\x00\x07\ufffe]", "�", name)


def test_names_of_a_model_are_only_ever_text() -> None:
    data = hostile_report()
    svg = placement.draw(data, HOSTILE[3])
    check_boxes(svg, data)
    found = list(walk(ET.fromstring(svg)))
    assert {f.element.tag.removeprefix(SVG) for f in found} == {
        *("svg", "style", "defs", "marker", "path", "rect", "g", "title", "text")
    }
    attributes = {name for f in found for name in f.element.attrib}
    assert not any(name.startswith("on") or "href" in name for name in attributes)
    titles = {f.element.get("id"): f.title for f in found if "node" in f.classes}
    for k, name in enumerate(HOSTILE):
        assert titles[f"n{k}"].startswith(f"{data['nodes'][k]['op']} {readable(name)}\n")
    for f in found:
        if f.element.tag == f"{SVG}text":
            assert not re.search("[\n\t\u202e\u2066]", f.element.text or "")


def test_the_page_holds_one_script_and_all_names_as_text() -> None:
    data = hostile_report()
    root = read_html(placement_page.page(data, HOSTILE[0]))
    (script,) = root.all("script")
    policy = next(m.attrs["content"] for m in root.all("meta") if m.attrs.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not root.all("img") and not root.all("link") and not root.all("b") and not root.all("iframe")
    elements = [e for tag in ("g", "td", "button", "h1", "rect", "path", "svg", "input") for e in root.all(tag)]
    assert not any(name.startswith("on") or name in ("src", "href") for e in elements for name in e.attrs)
    assert root.all("h1")[0].text == HOSTILE[0]
    cells = [cell.whole_text for cell in root.all("td")]
    assert HOSTILE[0] in cells  # the reason
    assert all(readable(name) in cells for name in HOSTILE)  # the fallbacks
    drawn = {g.attrs["id"] for g in root.all("g") if g.attrs.get("class") == "node"}
    assert drawn == {f"n{k}" for k in range(len(HOSTILE))}


def test_the_page_has_tables_that_lead_to_the_picture(split: dict[str, Any]) -> None:
    root = read_html(placement_page.page(split))
    assert [h.text for h in root.all("h2")] == ["Parts", "Transfers in a run", "Why providers declined"]
    goals = [button.attrs["data-go"] for button in root.all("button") if "data-go" in button.attrs]
    ids = {g.attrs.get("id") for g in root.all("g")}
    assert goals == ["p0", "p1", "p2", "p3", "p4"] and set(goals) <= ids
    rows = [[cell.whole_text.strip() for cell in row.all("td")] for row in root.all("tr")]
    assert ["cpu → sim:0", "512 B", "v1"] in rows
    assert ["sim", "this accelerator does not have the operator", "3", "Relu, Tanh, Abs", "relu, tanh, abs"] in rows
    assert ["1", "sim", "1", "matmul"] in rows
    used = set(re.findall(r'byId\("(\w+)"\)', root.all("script")[0].text))
    everything = [e for tag in ("div", "pre", "input", "output", "button") for e in root.all(tag)]
    assert used <= {e.attrs.get("id") for e in everything} and len(used) >= 6


@pytest.mark.parametrize(("nodes", "cut", "reach"), [(5000, 500, 30), (600, 600, 4), (400, 3, 9), (160, 1, 12)])
def test_large_graphs(nodes: int, cut: int, reach: int) -> None:
    data = made_up(nodes, cut, reach)
    svg = placement.draw(data)
    check_boxes(svg, data)
    texts = {found.element.get("id"): found.texts for found in of_class(svg, "node")}
    assert all(texts[f"n{k}"] == [node["op"]] for k, node in enumerate(data["nodes"]))  # names are under the pointer


def test_lines_that_reach_too_far_go_straight_across(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made_up(60, 60, 3)
    data["nodes"][59]["inputs"] = ["v0", "v58"]
    before = placement.draw(data)
    monkeypatch.setattr(placement, "_MOST_PASSING", 100)
    after = placement.draw(data)
    check_boxes(after, data)
    count = len(of_class(before, "line"))
    assert len(of_class(after, "line")) == count and not of_class(before, "across")
    across = of_class(after, "across")
    assert 0 < len(across) < count / 2
    boxes = {found.element.get("id"): found.box for found in of_class(after, "node")}
    (x, y), (to_x, to_y) = max((ends(line) for line in across), key=lambda line: line[1][1] - line[0][1])
    assert abs(y - boxes["n0"][3]) < 0.2 and boxes["n0"][0] < x < boxes["n0"][2]
    assert abs(to_y - boxes["n59"][1]) < 0.2 and boxes["n59"][0] < to_x < boxes["n59"][2]


def test_a_graph_without_nodes() -> None:
    graph = Graph("empty")
    graph.outputs = [graph.add_input("a", TensorType(DType.float32, (2,)))]
    with Session(graph, SessionConfig(providers=("reference",))) as session:
        data = session.report.to_dict()
    svg = placement.draw(data)
    assert [found.texts[0] for found in of_class(svg, "end")] == ["a", "a"]
    read_html(placement_page.page(data))


def test_colours_begin_anew_with_other_marks() -> None:
    nodes = [{"provider": f"p{k}", "op": "Relu", "name": ""} for k in range(20)]
    looks = placement.looks({"nodes": nodes, "providers": ["p3"]})
    assert next(iter(looks)) == "p3"
    assert len({(look.colour, look.mark) for look in looks.values()}) == 20
    for look in looks.values():
        assert _contrast(look.colour, look.ink) >= 4.5  # the ratio that ordinary text needs


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear))

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
