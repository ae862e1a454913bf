"""When parts run: list scheduling, in which parts of different engines overlap where nothing makes one wait.

Parts as the runtime forms them for one thread are too coarse for this: a part starts when all its inputs are there and
gives its outputs when it ends. So parts are cut where a value leaves for another provider or arrives from one. Each
then goes, in the order of its upward rank (the longest way from it to the end), to the lane where it ends first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ranvier.records import dataclass
from ranvier.runtime.partition.problem import HOST, OUTSIDE, Problem


@dataclass(frozen=True)
class Step:
    """One part in time: when it starts and ends in seconds, on which lane of which engine, and what it waits for."""

    owner: int
    nodes: tuple[int, ...]
    start: float
    end: float
    engine: int
    lane: int
    after: tuple[int, ...]  # steps
    wave: int = -1  # steps of one wave run at the same time in threads of the host, one thread for each lane
    threads: int = 0  # that it may use itself; 0: all that the session has


@dataclass(frozen=True)
class Schedule:
    """Steps in order of their start; ``seconds`` until every output is on the host."""

    steps: tuple[Step, ...]
    seconds: float
    serial: float  # the same placement, part after part

    @property
    def overlaps(self) -> list[tuple[int, int]]:
        """Pairs of steps that are predicted to run at the same time."""
        found: list[tuple[int, int]] = []
        running: list[int] = []
        for k, step in enumerate(self.steps):
            running = [other for other in running if self.steps[other].end > step.start]
            found += [(other, k) for other in running if step.end > step.start]
            running.append(k)
        return found


@dataclass(frozen=True)
class Cut:
    """Nodes of one provider that run in a row, and how long that takes."""

    owner: int
    nodes: tuple[int, ...]
    seconds: float


def schedule(problem: Problem, owner: Sequence[int]) -> Schedule:
    """The predicted run of a placement: overlapping where that is faster, else part after part."""
    serial = problem.cost(owner).total
    found = _overlapped(problem, owner, serial, fine=False)
    if any(problem.choices[who].lanes > 1 for who in set(owner)):
        again = _overlapped(problem, owner, serial, fine=True)
        found = again if again.seconds < found.seconds else found
    return found if found.seconds < serial else in_sequence(problem, owner)


def in_sequence(problem: Problem, owner: Sequence[int]) -> Schedule:
    """Part after part, each with the transfers of what it reads before it; outputs come home at the end."""
    engines = engines_of(problem)
    steps: list[Step] = []
    paid: set[tuple[int, int]] = set()
    now = 0.0
    for k, (who, nodes) in enumerate(problem.parts(owner)):
        for node in nodes:
            for index in problem.touching[node]:
                flow = problem.flows[index]
                source = HOST if flow.producer == OUTSIDE else problem.space[owner[flow.producer]]
                target = problem.space[who]
                if flow.producer != node and source != target and (index, target) not in paid:
                    paid.add((index, target))
                    now += problem.moving(source, target, flow.nbytes)
        seconds = problem.launch[who] + sum(problem.seconds[node][who] for node in nodes)
        steps.append(Step(who, tuple(nodes), now, now + seconds, engines[who], 0, (k - 1,) if k else ()))
        now += seconds
    serial = problem.cost(owner).total
    return Schedule(tuple(steps), serial, serial)


def _overlapped(problem: Problem, owner: Sequence[int], serial: float, fine: bool) -> Schedule:
    parts, part_of = cut(problem, owner, fine)
    before, after = joined(problem, part_of, len(parts))
    moves = moves_of(problem, owner, part_of, len(parts))
    rank = ranks(problem, parts, after, moves)
    engines = engines_of(problem)
    free = {engines[p]: [0.0] * max(1, choice.lanes) for p, choice in enumerate(problem.choices)}
    link_free: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], float] = {}  # (flow, memory) -> when it is there
    waiting = [len(each) for each in before]
    ready = [(-rank[k], k) for k, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    end = [0.0] * len(parts)
    placed: list[tuple[float, int, int]] = []  # start, part, lane
    last = 0.0
    while ready:
        k = heapq.heappop(ready)[1]
        part = parts[k]
        inputs = max((end[other] for other in before[k]), default=0.0)
        for index, source, maker in moves.reads[k]:
            target = problem.space[part.owner]
            if (index, target) not in arrived:
                arrived[index, target] = carry(
                    problem, index, source, target, end[maker] if maker >= 0 else 0.0, link_free
                )
            inputs = max(inputs, arrived[index, target])
        lanes = free[engines[part.owner]]
        lane = min(range(len(lanes)), key=lambda j: (max(lanes[j], inputs), j))
        start = max(lanes[lane], inputs)
        end[k] = lanes[lane] = start + part.seconds
        placed.append((start, k, lane))
        last = max(last, end[k])
        for index, source in moves.home[k]:
            if (index, HOST) not in arrived:
                arrived[index, HOST] = carry(problem, index, source, HOST, end[k], link_free)
            last = max(last, arrived[index, HOST])
        for other in after[k]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (-rank[other], other))
    order = sorted(range(len(placed)), key=lambda j: (placed[j][0], j))
    place = {placed[j][1]: position for position, j in enumerate(order)}
    steps = [
        Step(
            parts[k].owner,
            parts[k].nodes,
            start,
            end[k],
            engines[parts[k].owner],
            lane,
            tuple(sorted(place[other] for other in before[k])),
        )
        for start, k, lane in (placed[j] for j in order)
    ]
    return Schedule(tuple(steps), last, serial)


def carry(
    problem: Problem, index: int, source: int, target: int, ready: float, link_free: dict[tuple[int, int], float]
) -> float:
    """When a value arrives; one value at a time on the way between two memories."""
    start = max(ready, link_free.get((source, target), 0.0))
    end = start + problem.moving(source, target, problem.flows[index].nbytes)
    link_free[source, target] = end
    return end


def joined(problem: Problem, part_of: Sequence[int], count: int) -> tuple[list[dict[int, None]], list[dict[int, None]]]:
    """For every part those that must have run before it, and those that wait for it."""
    before: list[dict[int, None]] = [{} for _ in range(count)]
    after: list[dict[int, None]] = [{} for _ in range(count)]
    for node, earlier in enumerate(problem.before):
        for other in sorted(earlier):
            a, b = part_of[other], part_of[node]
            if a != b:
                before[b][a] = None
                after[a][b] = None
    return before, after


def cut(problem: Problem, owner: Sequence[int], fine: bool) -> tuple[list[Cut], list[int]]:
    """Nodes of one provider with as many changes of provider before them and as many after them: such groups never
    wait for each other in a circle. Where an engine has several lanes, what is not joined inside a group is apart, and
    where parts shall be ``fine``, only nodes in a row stay together, so that branches between two nodes show."""
    n = problem.size
    split = [choice.lanes > 1 for choice in problem.choices]
    depth, height = [0] * n, [0] * n
    for node in range(n):
        for other in problem.before[node]:
            depth[node] = max(depth[node], depth[other] + (owner[other] != owner[node]))
    for node in reversed(range(n)):
        for other in problem.after[node]:
            height[node] = max(height[node], height[other] + (owner[other] != owner[node]))
    numbers: dict[tuple[int, ...], int] = {}
    root = list(range(n))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    keys = [(owner[node], depth[node], height[node]) for node in range(n)]
    for node in range(n):
        if split[owner[node]]:
            for other in problem.before[node]:
                in_row = len(problem.before[node]) == len(problem.after[other]) == 1
                if keys[other] == keys[node] and (in_row or not fine):
                    a, b = find(other), find(node)
                    root[max(a, b)] = min(a, b)
    members: list[list[int]] = []
    part_of = [0] * n
    for node in range(n):
        choice = problem.choices[owner[node]]
        row = node if not choice.whole_parts else find(node) if split[owner[node]] else -1
        key = (*keys[node], row)
        if key not in numbers:
            numbers[key] = len(members)
            members.append([])
        part_of[node] = numbers[key]
        members[numbers[key]].append(node)
    parts = [
        Cut(who, tuple(nodes), problem.launch[who] + sum(problem.seconds[node][who] for node in nodes))
        for nodes in members
        for who in (owner[nodes[0]],)
    ]
    return parts, part_of


@dataclass(frozen=True)
class Moves:
    """Of every part: the (value, from, its part or -1) it needs from elsewhere, the (value, from) it sends home."""

    reads: list[list[tuple[int, int, int]]]
    home: list[list[tuple[int, int]]]


def moves_of(problem: Problem, owner: Sequence[int], part_of: Sequence[int], count: int) -> Moves:
    found = Moves([[] for _ in range(count)], [[] for _ in range(count)])
    for index, flow in enumerate(problem.flows):
        source, targets = problem.reached(flow, owner)
        if not targets:
            continue
        maker = part_of[flow.producer] if flow.producer != OUTSIDE else -1
        for reader in dict.fromkeys(
            part_of[consumer] for consumer in flow.consumers if problem.space[owner[consumer]] != source
        ):
            found.reads[reader].append((index, source, maker))
        if flow.output and source != HOST and maker >= 0:
            found.home[maker].append((index, source))
    return found


def ranks(problem: Problem, parts: Sequence[Cut], after: Sequence[dict[int, None]], moves: Moves) -> list[float]:
    """The longest way from each part to the end, transfers included."""
    between: dict[tuple[int, int], float] = {}
    for reader, reads in enumerate(moves.reads):
        for index, source, maker in reads:
            seconds = problem.moving(source, problem.space[parts[reader].owner], problem.flows[index].nbytes)
            between[maker, reader] = max(between.get((maker, reader), 0.0), seconds)
    waiting = [len(each) for each in after]
    before: list[list[int]] = [[] for _ in parts]
    for k, later in enumerate(after):
        for other in later:
            before[other].append(k)
    rank = [0.0] * len(parts)
    todo = [k for k, count in enumerate(waiting) if not count]
    while todo:
        k = todo.pop()
        home = max((problem.moving(s, HOST, problem.flows[i].nbytes) for i, s in moves.home[k]), default=0.0)
        rest = max((between.get((k, other), 0.0) + rank[other] for other in after[k]), default=0.0)
        rank[k] = parts[k].seconds + max(home, rest)
        for other in before[k]:
            waiting[other] -= 1
            if not waiting[other]:
                todo.append(other)
    return rank


def engines_of(problem: Problem) -> list[int]:
    """The engine of every provider; those that name none get one of their own."""
    named = [choice.engine for choice in problem.choices if choice.engine is not None]
    return [
        choice.engine if choice.engine is not None else max(named, default=-1) + 1 + p
        for p, choice in enumerate(problem.choices)
    ]
