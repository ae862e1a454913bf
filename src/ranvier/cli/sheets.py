"""Tables that fit: laid out when the width is known, with text folded where there is too little room. A figure is never
cut, and never broken: where even that has no room, lines are longer than asked for.

rich is imported when something is drawn, so that help and JSON do not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_KINDS = ("", "!", ">")  # of columns, by what their headings begin with: text, text kept whole, figures
_PROSE, _NARROW, _LEAST = 24, 10, 8  # widths that text is folded to, the less room there is
_BETWEEN = re.compile(r"(?<= [|…]) ")  # figures of one cell: after a sign between two


class Sheet:
    """A heading that starts with ``>`` is of figures, right-aligned; ``!`` keeps cells whole as long as that goes."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        self.kinds = [heading[0] if heading.startswith((">", "!")) else "" for heading in columns]
        self.headings = [heading.lstrip(">!") for heading in columns]
        self.rows = [["" if cell is None else str(cell) for cell in row] for row in rows]
        self.title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table

        gap, widths = self._laid_out(options.max_width)
        made = Table(
            box=box.SIMPLE_HEAD,
            title=self.title or None,
            title_justify="left",
            pad_edge=False,
            show_edge=False,
            padding=(0, 1, 0, gap - 2),  # beside the one column that lies between
        )
        for kind, heading, width in zip(self.kinds, self.headings, widths):
            made.add_column(heading, justify="right" if kind == ">" else "left", overflow="fold", width=width)
        for row in self.rows:
            cells = zip(self.kinds, row, widths)
            made.add_row(*(_BETWEEN.sub("\n", c) if k == ">" and _widest([c]) > w else c for k, c, w in cells))
        room = max(options.max_width, sum(widths) + gap * (len(widths) - 1))
        yield from console.render(made, options.update_width(room))

    def _laid_out(self, room: int) -> tuple[int, list[int]]:
        """Columns between two cells, and the widths: what is given up first is what can be read all the same."""
        columns = list(zip(*self.rows)) or [()] * len(self.headings)
        names = [_widest(heading.split()) for heading in self.headings]
        cells = [_widest(column) for column in columns]
        words = [max(name, _widest(" ".join(column).split())) for name, column in zip(names, columns)]
        whole = [max(name, cell) for name, cell in zip(names, cells)]
        pieces = [_widest(piece for cell in column for piece in _BETWEEN.split(cell)) for column in columns]
        widths = [max(cell, _widest([heading])) for cell, heading in zip(cells, self.headings)]
        prose, narrow = ([max(name, limit) for name in names] for limit in (_PROSE, _NARROW))
        stages = [  # columns between, and the floors: of text, of cells that are kept whole, of figures
            (3, prose, whole, widths),
            (3, prose, whole, whole),
            (2, narrow, whole, whole),
            (2, narrow, words, whole),
            (2, narrow, words, list(map(max, names, pieces))),
            (2, [_LEAST] * len(names), [_LEAST] * len(names), pieces),
        ]
        gap = 3
        for gap, *floors in stages:
            free = room - gap * (len(widths) - 1)
            self._narrow(widths, [floors[_KINDS.index(kind)][k] for k, kind in enumerate(self.kinds)], free)
            if sum(widths) <= free:
                break
        return gap, widths

    def _narrow(self, widths: list[int], least: Sequence[int], free: int) -> None:
        """The widest column first: figures at once, for a heading is broken at words only, text bit by bit."""
        while sum(widths) > free:
            able = [k for k, width in enumerate(widths) if width > least[k]]
            if not able:
                return
            k = max(able, key=lambda k: widths[k])
            widths[k] = least[k] if self.kinds[k] == ">" else widths[k] - 1


def _widest(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


__all__ = ["Sheet"]
