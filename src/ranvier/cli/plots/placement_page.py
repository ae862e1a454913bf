"""Where a model runs, as a page: the picture with search, panning and zooming, and tables of parts, transfers and
reasons. One file, which loads nothing: its policy allows only the script that it was written with."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from ranvier.cli.plots import placement
from ranvier.cli.plots.placement_text import Costs, Data, count, listed, transfer_size, transfer_title
from ranvier.cli.render import bytes_text, seconds_text
from ranvier.graph.svg import xml

_MOST_ROWS = 500  # of a table; the picture has the rest


def page(data: Data, title: str = "") -> str:
    """The page of a report's data."""
    files = resources.files("ranvier.cli.plots")
    script = files.joinpath("placement_page.js").read_text("utf-8")
    style = files.joinpath("placement_page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    name = title or data.get("model", "") or "model"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(name)}: where it runs</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            _bar(name),
            '<main><div id="view">',
            placement.draw(data, name),
            '</div><aside id="side"><pre id="about" aria-live="polite">Point at something to read about it.</pre>',
            *_tables(data),
            "</aside></main>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _bar(name: str) -> str:
    return (
        f"<header><h1>{_text(name)}</h1>"
        '<input id="search" type="search" placeholder="Search names, operators, reasons" aria-label="Search">'
        '<output id="found"></output><span class="buttons">'
        '<button id="in" title="Zoom in">+</button><button id="out" title="Zoom out">−</button>'
        '<button id="fit" title="Show all of it">Fit</button></span></header>'
    )


def _tables(data: Data) -> Iterable[str]:
    costs = Costs(data)
    marks = placement.looks(data)
    nodes: Sequence[Data] = data["nodes"]

    def provider(name: str) -> str:
        look = marks.get(name)
        if look is None:
            return _text(name)
        mark = f'<svg class="key" viewBox="0 0 10 10"><path fill="{look.colour}" d="{look.mark}"/></svg>'
        return f"{mark} {_text(name)}"

    def cost(seconds: float | None) -> str:
        return "" if seconds is None else _text(seconds_text(seconds))

    yield _table(
        "Parts",
        ("part", "provider", ">nodes", ">predicted", "~first node"),
        [
            (
                _link(f"p{p}", str(p)),
                provider(part["provider"]),
                str(len(part["nodes"])),
                cost(costs.part(part["nodes"])),
                _text(nodes[part["nodes"][0]]["name"] or nodes[part["nodes"][0]]["op"]) if part["nodes"] else "",
            )
            for p, part in enumerate(data["parts"])
        ],
    )
    yield _table(
        "Transfers in a run",
        ("way", ">bytes", ">predicted", "~values"),
        [
            (
                _text(transfer_title(t)),
                _text(transfer_size(t)),
                cost(costs.transfer(t)),
                _text(listed(t["values"], 5)),
            )
            for t in data.get("transfers", ())
        ],
    )
    yield _table(
        "Transfers so far",
        ("way", ">times", ">bytes", ">time"),
        [
            (_text(transfer_title(m)), str(m["transfers"]), _text(bytes_text(m["bytes"])), cost(m["seconds"]))
            for m in data.get("moved", ())
        ],
    )
    yield _table(
        "Why providers declined",
        ("provider", "~reason", ">nodes", "~operators", "~for example"),
        [
            (
                provider(d["provider"]),
                _text(d["reason"]),
                str(d["count"]),
                _text(listed(d["operators"], 5)),
                _text(listed(d["examples"], 3)),
            )
            for d in data.get("declined", ())
        ],
    )
    yield _table("Fallbacks", ("~what happened",), [(_text(text),) for text in data.get("fallbacks", ())])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML already; nothing where it would be empty. ``>`` aligns a column to the right, in one
    with ``~`` lines break anywhere, and a column without any cell is left out."""
    if not rows:
        return ""
    shown = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    parts = [f"<section><h2>{_text(title)}</h2><table><thead><tr>"]
    parts += [_cell("th", columns[k], _text(columns[k].lstrip(">~"))) for k in shown]
    parts.append("</tr></thead><tbody>")
    for row in rows[:_MOST_ROWS]:
        parts.append("<tr>" + "".join(_cell("td", columns[k], row[k]) for k in shown) + "</tr>")
    parts.append("</tbody></table>")
    if len(rows) > _MOST_ROWS:
        parts.append(f"<p>and {count(len(rows) - _MOST_ROWS, 'row')} more</p>")
    return "".join([*parts, "</section>"])


def _cell(kind: str, column: str, content: str) -> str:
    look = {">": " class=number", "~": " class=long"}.get(column[0], "")
    return f"<{kind}{look}>{content}</{kind}>"


def _link(target: str, text: str) -> str:
    return f'<button class="go" data-go="{target}">{_text(text)}</button>'


def _text(text: Any) -> str:
    """Text of a model in HTML: escaped, and without what no document may hold."""
    return xml(str(text)).replace('"', "&quot;")


__all__ = ["page"]
