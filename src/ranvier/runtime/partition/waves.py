"""Parts of the host that run at the same time: waves of lanes, each lane a row of parts in a thread of its own.

A wave begins when all that it reads is there and ends when its last lane has ended; no lane waits for another inside.
That costs a little time against starting each part as early as can be, and keeps everything else simple: what a lane
needs for itself lies in memory of its own, and a failure leaves nothing running.

The session's threads are shared. A part that works on one thread leaves the others to the rest of its wave; of those
that can use more, one lane gets what is left and the others one thread each, because native code has one team of
helpers. So a part in a wave takes longer than by itself, and a wave is formed where it gains all the same. Where a
long part stands beside short ones it is cut, so that its rest has all threads again. Branches inside a part are left
to its provider: cutting them apart costs what it gains by having them in one piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from ranvier.records import dataclass
from ranvier.runtime.partition.problem import HOST, Problem
from ranvier.runtime.partition.schedule import Cut, Schedule, Step, carry, cut, engines_of, joined, moves_of, ranks

GAIN = 0.2  # share of the time that waves must save: less than that, predictions err
EFFORT = 40_000  # nodes that may be scheduled and parts that may be looked at, in all attempts together
DEVICE = -1  # of a provider: computes elsewhere
UNKNOWN = 0  # nobody knows how many threads it uses, so nothing runs beside it
_SERIAL = 25e-6  # seconds on one thread below which native code does not ask a second one for help
_HANDOVER = 60e-6  # seconds to wake a thread, and to wait for its end
_SWITCH = 5e-3  # seconds that a thread may wait for the interpreter's lock, at each end of a part
_WORTH = 0.95  # of the time part after part: a wave that saves less is not formed
_MOST_LANES = 4
_CUTS = 4  # attempts with a part cut in two


@dataclass(frozen=True)
class Threads:
    """The threads of a session, and what its providers do with them."""

    count: int
    used: Sequence[int]  # by provider: DEVICE, UNKNOWN, one, or as many as ``count``
    locked: Mapping[tuple[int, int], float]  # (node, provider) -> seconds with the interpreter's lock held
    alone: frozenset[tuple[int, int]] = frozenset()  # (node, provider) that runs threads of its own meanwhile


@dataclass(frozen=True)
class Group:
    """What starts together: the parts of every lane, in order. One lane: no wave."""

    lanes: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...] = (0,)  # threads for each lane; 0: all


def in_waves(problem: Problem, owner: Sequence[int], threads: Threads) -> Schedule | None:
    """The best run of a placement in which parts of the host overlap; None where none can."""
    if threads.count < 2 or all(threads.used[who] < 1 for who in set(owner)):
        return None
    whole = [part.nodes for part in cut(problem, owner, fine=False)[0]]
    effort, best = EFFORT, None
    for lanes in range(2, min(threads.count, _MOST_LANES) + 1):
        parts = list(whole)
        for _ in range(_CUTS):
            if len(parts) < 2 or effort <= 0:
                break
            run = _Run(problem, owner, threads, parts, effort)
            longer = run.fill(lanes)
            effort = run.effort - problem.size
            if run.waves and (best is None or run.last < best.seconds):
                best = run.schedule()
            if longer is None:
                break
            k, at = longer
            parts[k : k + 1] = [parts[k][:at], parts[k][at:]]
    return best


def timed(
    problem: Problem, owner: Sequence[int], threads: Threads, groups: Sequence[Sequence[Sequence[Sequence[int]]]]
) -> Schedule:
    """What a run takes whose waves are known: groups in order, of lanes, of parts, of nodes."""
    run = _Run(problem, owner, threads, [part for group in groups for lane in group for part in lane])
    start = 0
    for group in groups:
        ends = list(accumulate((len(lane) for lane in group), initial=start))
        lanes = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
        start = ends[-1]
        if threads.used[run.parts[lanes[0][0]].owner] == DEVICE:
            run.start_on_device(lanes[0][0])
        else:
            run.start(Group(lanes, run.shares(lanes)) if len(lanes) > 1 else Group(lanes))
    return run.schedule()


class _Run:
    """Parts put into time, one group after the other."""

    def __init__(
        self,
        problem: Problem,
        owner: Sequence[int],
        threads: Threads,
        parts: Sequence[Sequence[int]],
        effort: int = EFFORT,
    ) -> None:
        self.effort = effort
        self._problem, self._threads = problem, threads
        self._whole = problem.cost(owner).total
        part_of = [0] * problem.size
        for k, nodes in enumerate(parts):
            for node in nodes:
                part_of[node] = k
        self._before, self._after = joined(problem, part_of, len(parts))
        self._moves = moves_of(problem, owner, part_of, len(parts))
        self._host = {HOST, *(problem.space[p] for p, used in enumerate(threads.used) if used != DEVICE)}
        self._fixed = [0.0] * len(parts)  # seconds of each part that do not depend on threads
        self._shared = [0.0] * len(parts)  # those that do
        self._locked = [0.0] * len(parts)
        self._solitary = [False] * len(parts)
        self.parts = [self._measured(k, owner[nodes[0]], tuple(nodes)) for k, nodes in enumerate(parts)]
        self._rank = ranks(problem, self.parts, self._after, self._moves)
        self._engines = engines_of(problem)
        self._free = {self._engines[p]: [0.0] * max(1, each.lanes) for p, each in enumerate(problem.choices)}
        self._links: dict[tuple[int, int], float] = {}
        self._arrived: dict[tuple[int, int], float] = {}
        self._waiting = [len(each) for each in self._before]
        self._end = [0.0] * len(parts)
        self._placed: list[tuple[float, float, int, int, int, int]] = []  # start, end, part, lane, wave, threads
        self._now = 0.0  # of the thread that starts everything
        self.last = 0.0
        self.waves = 0

    def _measured(self, k: int, who: int, nodes: tuple[int, ...]) -> Cut:
        problem, threads = self._problem, self._threads
        fixed, shared = problem.launch[who], 0.0
        for node in nodes:
            seconds = problem.seconds[node][who]
            if threads.used[who] > 1 and seconds * threads.count > _SERIAL:
                shared += seconds
            else:
                fixed += seconds
        target = problem.space[who]
        if threads.used[who] != DEVICE:  # handing over between two providers of the host is the reader's work
            for index, source, _ in self._moves.reads[k]:
                if source in self._host:
                    fixed += problem.moving(source, target, problem.flows[index].nbytes)
            for index, source in self._moves.home[k]:
                fixed += problem.moving(source, HOST, problem.flows[index].nbytes)
        self._fixed[k], self._shared[k] = fixed, shared
        self._locked[k] = sum(threads.locked.get((node, who), 0.0) for node in nodes)
        self._solitary[k] = threads.used[who] < 1 or any((node, who) in threads.alone for node in nodes)
        return Cut(who, nodes, fixed + shared)

    # -- what a group takes -----------------------------------------------------------------------------------------

    def _seconds(self, k: int, width: int) -> float:
        return self._fixed[k] + self._shared[k] * (self._threads.count / width if width else 1.0)

    def shares(self, lanes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Threads for each lane: what the others leave goes to the one with the most work that can use them."""
        work = [sum(self._shared[k] for k in lane) for lane in lanes]
        first = max(range(len(lanes)), key=lambda j: (work[j], -j))
        return tuple(self._threads.count - len(lanes) + 1 if j == first and work[j] else 1 for j in range(len(lanes)))

    def _lasting(self, group: Group) -> float:
        """Seconds of a group: of its longest lane, and no less than all that the interpreter does in turn."""
        if len(group.lanes) == 1:
            return sum(self._seconds(k, group.widths[0]) for k in group.lanes[0])
        locked = [sum(self._locked[k] for k in lane) for lane in group.lanes]
        longest = 0.0
        for lane, width, own in zip(group.lanes, group.widths, locked):
            kept_waiting = min(2 * _SWITCH * len(lane), sum(locked) - own)
            longest = max(longest, sum(self._seconds(k, width) for k in lane) + kept_waiting)
        return max(longest, sum(locked)) + _HANDOVER

    # -- putting parts into time ------------------------------------------------------------------------------------

    def _ready(self, k: int) -> float:
        """When all that a part reads is there, as far as others have been put into time."""
        problem, target = self._problem, self._problem.space[self.parts[k].owner]
        at = max((self._end[other] for other in self._before[k]), default=0.0)
        for index, source, maker in self._moves.reads[k]:
            if source in self._host and target in self._host:
                continue
            if (index, target) not in self._arrived:
                made = self._end[maker] if maker >= 0 else 0.0
                self._arrived[index, target] = carry(problem, index, source, target, made, self._links)
            at = max(at, self._arrived[index, target])
        return at

    def start_on_device(self, k: int) -> None:
        part = self.parts[k]
        lanes = self._free[self._engines[part.owner]]
        ready = self._ready(k)
        lane = min(range(len(lanes)), key=lambda j: (max(lanes[j], ready), j))
        begin = max(lanes[lane], ready)
        lanes[lane] = begin + part.seconds
        self._note(k, begin, begin + part.seconds, lane, -1, 0)
        for index, source in self._moves.home[k]:
            if (index, HOST) not in self._arrived:
                self._arrived[index, HOST] = carry(self._problem, index, source, HOST, self._end[k], self._links)
            self.last = max(self.last, self._arrived[index, HOST])

    def start(self, group: Group) -> None:
        wave = -1
        if len(group.lanes) > 1:
            wave, self.waves = self.waves, self.waves + 1
        begin = max([self._now, *(self._ready(k) for lane in group.lanes for k in lane)])
        self._now = begin + self._lasting(group)
        for j, (lane, width) in enumerate(zip(group.lanes, group.widths)):
            at = begin
            for k in lane:
                self._note(k, at, at + self._seconds(k, width), j, wave, width)
                at += self._seconds(k, width)
        self.last = max(self.last, self._now)

    def _note(self, k: int, begin: float, end: float, lane: int, wave: int, width: int) -> None:
        self._end[k] = end
        self.last = max(self.last, end)
        self._placed.append((begin, end, k, lane, wave, width))
        for other in self._after[k]:
            self._waiting[other] -= 1

    # -- finding waves ----------------------------------------------------------------------------------------------

    def fill(self, lanes: int) -> tuple[int, int] | None:
        """Put everything into time, in waves of up to ``lanes`` lanes; a part that should be cut, and where."""
        wish: tuple[int, int] | None = None
        open_ = {k for k, count in enumerate(self._waiting) if not count}
        while open_:
            device = [k for k in open_ if self._threads.used[self.parts[k].owner] == DEVICE]
            if device:
                done = [min(device, key=lambda k: (-self._rank[k], k))]
                self.start_on_device(done[0])
            else:
                first = min(open_, key=lambda k: (max(self._now, self._ready(k)), -self._rank[k], k))
                group, longer = self._wave(open_, first, lanes) if len(open_) > 1 and self.effort > 0 else (None, None)
                wish = wish or longer
                self.start(group or Group(((first,),)))
                done = [k for lane in group.lanes for k in lane] if group else [first]
            open_.difference_update(done)
            open_.update(other for k in done for other in self._after[k] if not self._waiting[other])
            open_.difference_update(done)
        return wish

    def _wave(self, open_: set[int], first: int, count: int) -> tuple[Group | None, tuple[int, int] | None]:
        """A wave that begins with what is ready when ``first`` is, where one gains; and the part to be cut for it."""
        lanes = self._lanes(open_, max(self._now, self._ready(first)), count)
        if len(lanes) < 2:
            return None, None
        widths = self.shares(lanes)
        times = [sum(self._seconds(k, width) for k in lane) for lane, width in zip(lanes, widths)]
        longest = max(range(len(lanes)), key=lambda j: times[j])
        second = max(seconds for j, seconds in enumerate(times) if j != longest)
        row, width = lanes[longest], widths[longest]
        while len(row) > 1 and times[longest] - self._seconds(row[-1], width) >= second:
            times[longest] -= self._seconds(row.pop(), width)  # all others have ended by then
        group = Group(tuple(map(tuple, lanes)), widths)
        longer = None
        if times[longest] > 1.1 * second:
            longer = self._cut_of(row[-1], width, second - times[longest] + self._seconds(row[-1], width))
        alone = sum(self._seconds(k, 0) for lane in lanes for k in lane)
        return group if self._lasting(group) < _WORTH * alone else None, longer

    def _lanes(self, open_: set[int], begin: float, count: int) -> list[list[int]]:
        """Rows of parts that do not wait for each other: a part follows the one row that it reads from, and one that
        reads from none goes where the least is to be done."""
        width = self._threads.count - count + 1
        lanes: list[list[int]] = [[] for _ in range(count)]
        spent = [0.0] * count
        lane_of: dict[int, int] = {}
        left: dict[int, int] = {}

        def enter(k: int) -> None:
            if not self._solitary[k] and self._ready(k) <= begin:
                heapq.heappush(ready, (-self._rank[k], k))

        ready: list[tuple[float, int]] = []
        for k in open_:
            enter(k)
        while ready:
            k = heapq.heappop(ready)[1]
            read = {lane_of[other] for other in self._before[k] if other in lane_of}
            if len(read) > 1:
                continue
            lane = read.pop() if read else min(range(count), key=lambda j: spent[j])
            lanes[lane].append(k)
            lane_of[k] = lane
            self.effort -= 1
            spent[lane] += self._seconds(k, width)
            for other in self._after[k]:
                left[other] = left.get(other, self._waiting[other]) - 1
                if not left[other]:
                    enter(other)
        return [lane for lane in lanes if lane]

    def _cut_of(self, k: int, width: int, seconds: float) -> tuple[int, int] | None:
        """The part with the number of its nodes that take about ``seconds``; None where it cannot be cut there."""
        part = self.parts[k]
        if self._threads.used[part.owner] < 2 or self._shared[k] == 0.0:
            return None
        slower = self._threads.count / width
        spent = self._problem.launch[part.owner]
        at = 0
        for node in part.nodes:
            more = self._problem.seconds[node][part.owner] * slower
            if spent + more / 2 > seconds:
                break
            spent += more
            at += 1
        return (k, at) if 0 < at < len(part.nodes) else None

    def schedule(self) -> Schedule:
        order = sorted(range(len(self._placed)), key=lambda j: (self._placed[j][0], j))
        place = {self._placed[j][2]: position for position, j in enumerate(order)}
        steps = []
        for begin, end, k, lane, wave, width in (self._placed[j] for j in order):
            part = self.parts[k]
            after = tuple(sorted(place[other] for other in self._before[k]))
            steps.append(Step(part.owner, part.nodes, begin, end, self._engines[part.owner], lane, after, wave, width))
        return Schedule(tuple(steps), self.last, self._whole)


__all__ = ["DEVICE", "GAIN", "UNKNOWN", "Threads", "in_waves", "timed"]
