"""Tables fit the terminal, and no figure of them is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier.cli import bench
from ranvier.cli.render import Output, table
from ranvier.cli.sheets import _BETWEEN, Sheet
from ranvier.cli.suites.show import _columns
from tests.cli.conftest import Call

BENCH = ["!runtime", ">median", ">MAD", ">p10 … p90", ">runs", ">load", ">ranvier's speed", ">difference"]
WHY = ["!operator", ">nodes", "!provider", "why", "for example"]
TABLES: dict[str, tuple[list[str], list[Any]]] = {
    "bench": (
        BENCH,
        [
            ("ranvier 0.1.0", "431 ms", "± 13.2 µs", "428 ms … 452 ms", 1234, "102 ms", "", ""),
            ("onnxruntime 1.31.0", "431 ms", "± 113 µs", "428 ms … 452 ms", 1234, "2.31 s", "10.05×", "1.2e-07"),
        ],
    ),
    "suite": (
        _columns(["ranvier", "onnxruntime"]),
        [["a_model_with_a_long_name", "431 ms", "531 ms", "1.23", "1.1e-06", "120 ms | 33.1 ms | 12.2 ms",
          "120 MB | 134 MB", "14.1 MB", "98%"]],
    ),
    "prose": (WHY, [["Conv", 12_345, "reference", "a reason that goes on and on " * 4, "layer/" * 9]]),
    "empty": (BENCH, []),
}  # fmt: skip


def drawn(made: Sheet, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    Output().show(made)
    found: str = capsys.readouterr().out
    return found


def uncut(sheet: Sheet, text: str) -> None:
    """Every figure stands in the text, as a word of its own line."""
    for row in sheet.rows:
        for kind, cell in zip(sheet.kinds, row):
            if kind == ">" and cell:
                assert all(piece in text for piece in _BETWEEN.split(cell)), cell


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits(name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sheet = table(*TABLES[name])
    text = drawn(sheet, width, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace(" … ", "").replace(" …\n", "").replace("p10 …", "").replace("ms …", "")
    uncut(sheet, text)
    if name == "prose":
        assert text.count("/") == 9 and text.count("goes") == 4  # folded, and all there


def test_what_is_read_best_is_given_up_last(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Lines of prose, then lines of headings, then lines of cells."""
    columns, rows = TABLES["bench"]

    def lines(width: int) -> list[str]:
        return drawn(table(columns, rows), width, monkeypatch, capsys).splitlines()

    assert len(lines(110)) == 4
    heading, *rest = lines(97)
    assert heading.strip() == "ranvier's" and len(rest) == 4
    assert "428 ms … 452 ms" in rest[-1] and "onnxruntime 1.31.0" in rest[-1]
    assert not any("428 ms … 452 ms" in line for line in lines(72))


def test_lines_are_longer_where_figures_have_no_room(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sheet = table(*TABLES["bench"])
    text = drawn(sheet, 30, monkeypatch, capsys)
    uncut(sheet, text)
    assert max(map(len, text.splitlines())) > 30


@pytest.mark.parametrize("width", [80, 110])
def test_bench(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    times = dict.fromkeys(("median_seconds", "mad_seconds", "p10_seconds", "p90_seconds", "load_seconds"), 0.1234)
    runtimes = [{"name": name, "version": "1.31.0", "runs": 321, **times} for name in ("ranvier", "onnxruntime")]
    against = {"peer": "onnxruntime", "ratio": 12.34, "low": 1.0, "high": 2.0, "agrees": True}
    data = {"model": "m.onnx", "threads": 2, "rounds": 3, "inputs": {}, "runtimes": runtimes}
    monkeypatch.setenv("COLUMNS", str(width))
    bench._show(Output(), {**data, "comparisons": [{**against, "largest_relative_difference": 1.25e-7}]})
    text = capsys.readouterr().out
    assert "12.34×" in text and "1.2e-07" in text
    assert text.count("123 ms") == 2 * 5 and text.count("± 123 ms") == 2
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize(
    "command",
    [
        "cache",
        "explain",
        "explain --groups",
        "explain --nodes",
        "inspect --nodes",
        "profile",
        "providers",
        "run",
    ],
)
def test_commands(command: str, width: int, call: Call, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *options = command.split()
    sheets: list[Sheet] = []
    real = Sheet.__init__

    def noting(self: Sheet, *given: Any) -> None:
        real(self, *given)
        sheets.append(self)

    monkeypatch.setattr(Sheet, "__init__", noting)
    monkeypatch.setenv("COLUMNS", str(width))
    result = call(name, *([] if name in ("cache", "providers") else [dense]), *options)
    assert result.exit_code == 0, result.output
    assert sheets or name == "cache"  # which may be empty
    for sheet in sheets:
        uncut(sheet, result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= width
