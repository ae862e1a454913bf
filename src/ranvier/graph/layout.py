"""A layered layout for directed graphs: boxes in rows from top to bottom, links routed between them.

The classical four steps: rows by longest path, an order within each row that crosses few links, x positions that
keep links straight, then the lines. It knows nothing of operators; :mod:`ranvier.graph.draw` gives it sizes and
draws what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import pairwise

from ranvier.records import dataclass

Point = tuple[float, float]

_ORDER_SWEEPS = 12
_PLACE_SWEEPS = 24
_LINE_WIDTH = 10.0  # room a line takes when it passes through a row
_REAL, _LINE = 1.0, 6.0  # how strongly boxes and passing lines hold their place
_CORNER = 14.0  # lines meet a box at least this far from its corners


@dataclass
class Box:
    """Something to place. ``label`` is room to keep free on the right of its outgoing lines."""

    width: float
    height: float
    label: float = 0.0
    x: float = 0.0  # centre
    y: float = 0.0  # top


@dataclass
class Link:
    """A line from one box to another, by index. Links with one ``bundle`` share their way as far as they can."""

    source: int
    target: int
    bundle: int
    start: Point = (0.0, 0.0)
    points: list[tuple[Point, Point]] = field(default_factory=list)  # per gap between rows: both ends of a curve


@dataclass
class Spacing:
    """Distances in the unit of the boxes."""

    column: float = 22.0
    row: float = 40.0


def place(boxes: Sequence[Box], links: Sequence[Link], spacing: Spacing | None = None) -> tuple[float, float]:
    """Set positions of the boxes and the points of the links; returns the width and height of it all.

    The links must not form a cycle.
    """
    if not boxes:
        return 0.0, 0.0
    spacing = spacing or Spacing()
    rows = _Rows(boxes, links)
    rows.order()
    rows.position(spacing.column)
    return rows.finish(links, spacing)


def rows_of(boxes: int, links: Iterable[Link]) -> list[int]:
    """The row each box will stand in, so that one can tell how far links reach before they are placed."""
    return _ranks(boxes, links)[0]


class _Rows:
    """Items in rows: boxes, and one invisible item for every row a link passes through."""

    def __init__(self, boxes: Sequence[Box], links: Sequence[Link]) -> None:
        self.boxes = boxes
        ranks, self.from_start, self.to_end = _ranks(len(boxes), links)
        self.rank = list(ranks)
        self.above: list[list[int]] = [[] for _ in boxes]
        self.below: list[list[int]] = [[] for _ in boxes]
        self.routes: list[list[int]] = []  # per link: the items from source to target
        passing: dict[tuple[int, int], int] = {}  # (bundle, row) -> item
        joined: set[tuple[int, int]] = set()
        for link in links:
            route = [link.source]
            for row in range(ranks[link.source] + 1, ranks[link.target]):
                item = passing.get((link.bundle, row))
                if item is None:
                    item = passing[link.bundle, row] = len(self.rank)
                    self.rank.append(row)
                    self.from_start.append(self.from_start[link.source])
                    self.to_end.append(self.to_end[link.target])
                    self.above.append([])
                    self.below.append([])
                route.append(item)
            route.append(link.target)
            for upper, lower in pairwise(route):
                if (upper, lower) not in joined:
                    joined.add((upper, lower))
                    self.below[upper].append(lower)
                    self.above[lower].append(upper)
            self.routes.append(route)
        self.rows: list[list[int]] = [[] for _ in range(max(self.rank) + 1)]
        for item in _depth_first(self.above, self.below):
            self.rows[self.rank[item]].append(item)
        self.x = [0.0] * len(self.rank)

    def is_box(self, item: int) -> bool:
        return item < len(self.boxes)

    # -- order within the rows --------------------------------------------------------------------------------------

    def order(self) -> None:
        """Sweep down and up, sorting each row by the mean place of its neighbours; keep the best order seen."""
        place = [0] * len(self.rank)
        for row in self.rows:
            _number(row, place)
        best, fewest = [list(row) for row in self.rows], self._crossings(place)
        since = 0
        for sweep in range(_ORDER_SWEEPS):
            down = sweep % 2 == 0
            neighbours = self.above if down else self.below
            for row in self.rows if down else reversed(self.rows):
                row.sort(key=lambda item: _mean(neighbours[item] or [item], place))
                _number(row, place)
            crossings = self._crossings(place)
            since += 1
            if crossings < fewest:
                best, fewest, since = [list(row) for row in self.rows], crossings, 0
            if fewest == 0 or since >= 4:
                break
        self.rows = best

    def _crossings(self, place: Sequence[int]) -> int:
        """Pairs of links that cross, over all pairs of neighbouring rows."""
        total = 0
        for upper, lower in pairwise(self.rows):
            ends = [place[t] for item in upper for t in sorted(self.below[item], key=place.__getitem__)]
            total += _inversions(ends, len(lower))
        return total

    # -- x positions ------------------------------------------------------------------------------------------------

    def position(self, gap: float) -> None:
        """Every item as near to its neighbours as its row allows, alternately seen from above and from below."""
        for row in self.rows:
            at = 0.0
            for left, item in zip([None, *row], row):
                at = 0.0 if left is None else at + self._apart(left, item, gap)
                self.x[item] = at
            middle = at / 2
            for item in row:
                self.x[item] -= middle
        for sweep in range(_PLACE_SWEEPS):
            down = sweep % 2 == 1  # the last sweep goes down: lines leave a box straight
            neighbours = self.above if down else self.below
            for row in self.rows if down else reversed(self.rows):
                self._settle(row, neighbours, gap, down=down)

        for row in reversed(self.rows):
            self._draw_in(row, gap)

    def _settle(self, row: Sequence[int], neighbours: Sequence[Sequence[int]], gap: float, *, down: bool) -> None:
        wanted: list[float] = []
        strength: list[float] = []
        offsets = [0.0]
        for left, item in pairwise(row):
            offsets.append(offsets[-1] + self._apart(left, item, gap))
        for item, offset in zip(row, offsets):
            near = neighbours[item]
            wanted.append((self._median(item, near, down=down) if near else self.x[item]) - offset)
            # what lies in the middle of long ways holds its place against side branches
            weight = (1 + min(self.from_start[item], self.to_end[item])) * (_REAL if self.is_box(item) else _LINE)
            strength.append(weight if near else 0.05)
        for item, offset, at in zip(row, offsets, _nondecreasing(wanted, strength)):
            self.x[item] = at + offset

    def _draw_in(self, row: Sequence[int], gap: float) -> None:
        """Move boxes that nothing leads to near what they feed, as far as the others leave room; those stay."""
        for k, item in enumerate(row):
            if self.above[item] or not self.below[item]:
                continue
            left = self.x[row[k - 1]] + self._apart(row[k - 1], item, gap) if k > 0 else -math.inf
            right = self.x[row[k + 1]] - self._apart(item, row[k + 1], gap) if k + 1 < len(row) else math.inf
            self.x[item] = max(left, min(right, self._median(item, self.below[item], down=False)))

    def _median(self, item: int, near: Sequence[int], *, down: bool) -> float:
        """Where most of the pull comes from.

        So that the trunk stays straight, short side branches do not count, and going down a box follows boxes
        rather than passing lines.
        """
        if len(near) > 1:
            length = self.from_start if down else self.to_end
            longest = max(length[n] for n in near)
            near = [n for n in near if 4 * length[n] >= longest]
            if down and self.is_box(item):
                near = [n for n in near if self.is_box(n)] or near
        places = sorted(self.x[n] for n in near)
        middle = len(places) // 2
        return places[middle] if len(places) % 2 else (places[middle - 1] + places[middle]) / 2

    def _apart(self, left: int, right: int, gap: float) -> float:
        half = self.boxes[right].width / 2 if self.is_box(right) else _LINE_WIDTH / 2
        if not self.is_box(left):
            return _LINE_WIDTH / 2 + half + gap / 2
        box = self.boxes[left]
        return max(box.width / 2, box.label) + half + gap

    # -- lines ------------------------------------------------------------------------------------------------------

    def finish(self, links: Sequence[Link], spacing: Spacing) -> tuple[float, float]:
        left = min(self.x[i] - self._half(i) for i in range(len(self.x)))
        right = max(self.x[i] + max(self._half(i), self._label(i)) for i in range(len(self.x)))
        tops: list[float] = []
        bottoms: list[float] = []
        at = 0.0
        for row in self.rows:
            height = max((self.boxes[i].height for i in row if self.is_box(i)), default=0.0)
            tops.append(at)
            bottoms.append(at + height)
            widest = max((abs(self.x[i] - self.x[t]) for i in row for t in self.below[i]), default=0.0)
            at += height + spacing.row + min(widest * 0.05, spacing.row)  # long ways are less flat in a higher gap
        for item, box in enumerate(self.boxes):
            box.x = self.x[item] - left
            box.y = tops[self.rank[item]]
        for link, route in zip(links, self.routes):
            start = self.boxes[link.source].x
            for upper, lower in pairwise(route):
                end = self._meeting(lower, start, left)
                link.points.append(((start, bottoms[self.rank[upper]]), (end, tops[self.rank[lower]])))
                start = end
            source = self.boxes[link.source]
            link.start = (source.x, source.y + source.height)
        return right - left, bottoms[-1]

    def _meeting(self, item: int, start: float, left: float) -> float:
        """Where a line from ``start`` meets an item: straight below where that is possible."""
        x = self.x[item] - left
        if not self.is_box(item):
            return x
        reach = max(self.boxes[item].width / 2 - _CORNER, 0.0)
        return min(max(start, x - reach), x + reach)

    def _half(self, item: int) -> float:
        return self.boxes[item].width / 2 if self.is_box(item) else _LINE_WIDTH / 2

    def _label(self, item: int) -> float:
        return self.boxes[item].label if self.is_box(item) else 0.0


def _ranks(count: int, links: Iterable[Link]) -> tuple[list[int], list[int], list[int]]:
    """Rows of the boxes, and the lengths of the longest ways to each from a source and from each to a sink.

    A box stands in the row after the last one it takes from, then moves down to those it feeds where that
    lengthens no line.
    """
    above: list[set[int]] = [set() for _ in range(count)]
    below: list[set[int]] = [set() for _ in range(count)]
    for link in links:
        below[link.source].add(link.target)
        above[link.target].add(link.source)
    waiting = [len(a) for a in above]
    order = [k for k in range(count) if not waiting[k]]
    from_start = [0] * count
    for k in order:  # grows while it is read
        for t in below[k]:
            from_start[t] = max(from_start[t], from_start[k] + 1)
            waiting[t] -= 1
            if not waiting[t]:
                order.append(t)
    if len(order) != count:
        raise ValueError("the links form a cycle")
    rank, to_end = list(from_start), [0] * count
    for k in reversed(order):
        to_end[k] = max((to_end[t] + 1 for t in below[k]), default=0)
        if below[k] and len(below[k]) >= len(above[k]):
            rank[k] = min(rank[t] for t in below[k]) - 1
    return rank, from_start, to_end


def _depth_first(above: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> list[int]:
    """Items in the order a walk along the links meets them: a first order in which neighbours are near."""
    seen = [False] * len(below)
    found: list[int] = []
    for root in range(len(below)):
        if above[root]:
            continue
        stack = [root]
        while stack:
            item = stack.pop()
            if seen[item]:
                continue
            seen[item] = True
            found.append(item)
            stack.extend(reversed(below[item]))
    return found


def _number(row: Sequence[int], place: list[int]) -> None:
    for k, item in enumerate(row):
        place[item] = k


def _mean(neighbours: Sequence[int], place: Sequence[int]) -> float:
    return sum(place[n] for n in neighbours) / len(neighbours)


def _inversions(numbers: Sequence[int], below: int) -> int:
    """Pairs out of order, by a binary indexed tree over values smaller than ``below``."""
    tree = [0] * (below + 1)
    total = 0
    for seen, number in enumerate(numbers):
        at, smaller = number + 1, 0
        while at > 0:
            smaller += tree[at]
            at -= at & -at
        total += seen - smaller
        at = number + 1
        while at <= below:
            tree[at] += 1
            at += at & -at
    return total


def _nondecreasing(wanted: Sequence[float], strength: Sequence[float]) -> list[float]:
    """The non-decreasing numbers nearest to ``wanted`` in the weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(wanted, strength):
        count = 1
        while pools and pools[-1][0] > value:
            before, other, many = pools.pop()
            value = (before * other + value * weight) / (other + weight)
            weight += other
            count += many
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
