"""Which definitions are computed together.

A definition joins the one that follows it when everything its result flows into, up to that point, is pointwise work
over the same shape: the region between a definition and its immediate post-dominator. So chains fuse, and so do
diamonds (``x * sigmoid(x)``), and no intermediate result of a group is needed outside it. Only results of the whole
partition may stand in the midst of elementwise work: they are stored on the way (an optimizer's running means beside
the weights that follow from them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ranvier.codegen.definitions.defs import Contraction, Def, Moved, Pointwise, Rows
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr, Load, Op
from ranvier.graph.ir import Value
from ranvier.records import dataclass

_MAX_MEMBERS = 64  # of one group: bounds code size
_MAX_OPERANDS = 24
# Recomputed once per stage when fused into row work: not worth it.
_DEAR = frozenset({"exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "softplus", "pow", "sin", "cos", "div"})


@dataclass(eq=False)
class Group:
    """Definitions in order; the last one's result is the only one that other groups see (all of an anchor's, if
    alone)."""

    defs: list[Def] = field(default_factory=list)
    kept: list[Def] = field(default_factory=list)  # members of elementwise work that are results of the partition too

    @property
    def anchor(self) -> Contraction | Rows | None:
        return next((d for d in self.defs if isinstance(d, Contraction | Rows)), None)

    @property
    def last(self) -> Def:
        return self.defs[-1]


def group(program: Definitions, outputs: Sequence[Value]) -> list[Group]:
    """Groups in an order that runs; definitions that no output needs are left out."""
    defs = _needed(program.defs, outputs)
    return _Grouping(program, defs, set(outputs)).run()


def _needed(defs: Sequence[Def], outputs: Sequence[Value]) -> list[Def]:
    wanted = set(outputs)
    kept: list[Def] = []
    for each in reversed(defs):
        if any(v in wanted for v in each.outputs):
            wanted.update(each.operands)
            kept.append(each)
    return kept[::-1]


class _Grouping:
    def __init__(self, program: Definitions, defs: list[Def], outputs: set[Value]) -> None:
        self.program = program
        self.defs = defs
        self.index = {id(d): k for k, d in enumerate(defs)}
        maker = {v: k for k, d in enumerate(defs) for v in d.outputs}
        self.makers: list[list[int]] = [sorted({maker[v] for v in d.operands if v in maker}) for d in defs]
        self.users: list[list[int]] = [[] for _ in defs]
        for k, makers in enumerate(self.makers):
            for m in makers:
                self.users[m].append(k)
        self.escapes = [any(v in outputs for v in d.outputs) for d in defs]
        self.leader = list(range(len(defs)))
        self.members: dict[int, list[int]] = {k: [k] for k in range(len(defs))}

    def run(self) -> list[Group]:
        after = self._post_dominators()
        for k in range(len(self.defs)):
            self._fuse_forward(k, after)
        for k in range(len(self.defs)):
            self._leave_narrow(k)
        groups: dict[int, Group] = {}
        for k, each in enumerate(self.defs):
            groups.setdefault(self._find(k), Group()).defs.append(each)
        for found in groups.values():
            found.kept = [d for d in found.defs[:-1] if self.escapes[self.index[id(d)]]]
        # a group runs where its last member stands: all its operands are there by then
        return sorted(groups.values(), key=lambda g: self.index[id(g.last)])

    def _find(self, k: int) -> int:
        while self.leader[k] != k:
            self.leader[k] = self.leader[self.leader[k]]
            k = self.leader[k]
        return k

    def _post_dominators(self) -> list[int]:
        """For each definition the nearest one that all its uses lead to; -1 for none."""
        count = len(self.defs)
        after = [-1] * count
        for k in range(count - 1, -1, -1):
            if not self.users[k] or (self.escapes[k] and not isinstance(self.defs[k], Pointwise)):
                continue
            meet = self.users[k][0]
            for user in self.users[k][1:]:
                meet = self._meet(meet, user, after)
                if meet < 0:
                    break
            after[k] = meet
        return after

    @staticmethod
    def _meet(a: int, b: int, after: Sequence[int]) -> int:
        while a != b:
            if a < 0 or b < 0:
                return -1
            # the one that stands earlier in the order moves on: post-dominators stand later
            if a < b:
                a = after[a]
            else:
                b = after[b]
        return a

    def _fuse_forward(self, k: int, after: Sequence[int]) -> None:
        """Extend the group of definition ``k`` up to its post-dominator, again and again."""
        head = self.defs[k]
        if not isinstance(head, Pointwise | Moved | Contraction | Rows) or len(head.outputs) > 1:
            return
        target = after[k]
        if target < 0:
            return
        shape = self.program.shape(head.out)
        region = self._between(k, target)
        if region is None or not all(self._joins(self.defs[m], shape) for m in region):
            return
        end = self.defs[target]
        if isinstance(end, Rows):
            # elementwise work flows into the row's loads
            if isinstance(head, Contraction | Rows) or any(self._anchored(m) for m in [k, *region]):
                return
            if not self._feeds_row(end, shape, [k, *region]):
                return
        elif not self._joins(end, shape):
            return
        joined = {self._find(m) for m in [k, *region, target]}
        members = sorted(m for leader in joined for m in self.members[leader])
        anchors = [m for m in members if isinstance(self.defs[m], Contraction | Rows)]
        if len(anchors) > 1 or len(members) > _MAX_MEMBERS or not self._closed(members, target):
            return
        if len({v for m in members for v in self.defs[m].operands}) > _MAX_OPERANDS:
            return
        if not self._plain(members) or (anchors and not self._moves_before(anchors[0], members)):
            return
        first = min(joined)
        for leader in joined:
            self.leader[leader] = first
            if leader != first:
                del self.members[leader]
        self.members[first] = members

    def _leave_narrow(self, k: int) -> None:
        """Codes that become numbers at the end of a group are stored as codes, if those that read the numbers can
        make them: a quarter of the bytes, for the work of a subtraction and a multiplication."""
        members, each = self.members.get(self._find(k), []), self.defs[k]
        if len(members) < 2 or members[-1] != k or self.escapes[k] or not self._widens(each):
            return
        readers = {self._find(u) for u in self.users[k]}
        if len(readers) != 1 or not isinstance(each, Pointwise):
            return
        (leader,) = readers
        shape = self.program.shape(each.out)
        for user in (self.defs[u] for u in self.users[k]):
            feeds = isinstance(user, Rows) and self._feeds_row(user, shape, [k])
            if not feeds and not self._joins(user, shape):
                return
        joined = sorted([k, *self.members[leader]])
        if len(joined) > _MAX_MEMBERS or not self._plain(joined):
            return
        if len({v for m in joined for v in self.defs[m].operands}) > _MAX_OPERANDS or self._on_both_sides(k, joined):
            return
        self.members[self._find(k)] = members[:-1]
        self._apart(k, members, leader)
        self.members[leader] = joined

    def _apart(self, k: int, members: Sequence[int], leader: int) -> None:
        """Give ``k`` to the group of ``leader``; the others keep theirs."""
        first = self._find(k)
        for m in members:
            self.leader[m] = first
        self.leader[k] = leader

    def _widens(self, each: Def) -> bool:
        """Pointwise work on bytes whose result has more of them."""
        if not isinstance(each, Pointwise):
            return False
        program, shape = self.program, self.program.shape(each.out)
        whole = [program.dtype(u.value) for u in each.uses if u.shape is None and program.shape(u.value) == shape]
        return bool(whole) and program.dtype(each.out).bits > 8 and all(kind.bits == 8 for kind in whole)

    def _anchored(self, k: int) -> bool:
        return any(isinstance(self.defs[m], Contraction | Rows) for m in self.members[self._find(k)])

    def _joins(self, each: Def, shape: tuple[int, ...]) -> bool:
        return isinstance(each, Pointwise) and self.program.shape(each.out) == shape

    def _between(self, start: int, end: int) -> list[int] | None:
        """Definitions on the paths between the two (exclusive)."""
        seen: set[int] = set()
        stack = list(self.users[start])
        while stack:
            k = stack.pop()
            if k == end or k in seen:
                continue
            seen.add(k)
            if len(seen) > _MAX_MEMBERS:
                return None
            stack.extend(self.users[k])
        return sorted(seen)

    def _closed(self, members: Sequence[int], last: int) -> bool:
        """No member but the last is needed outside, except as a result of the partition beside elementwise work."""
        inside = set(members)
        stores = all(isinstance(self.defs[m], Pointwise) for m in members)
        return max(members) == last and all(
            m == last or ((stores or not self.escapes[m]) and all(u in inside for u in self.users[m])) for m in members
        )

    def _moves_before(self, anchor: int, members: Sequence[int]) -> bool:
        """Elements from computed positions may flow into an anchor; what follows one has only its own positions."""
        feeding = self._feeding(anchor, members)
        return all(m in feeding for m in members if isinstance(self.defs[m], Moved))

    def _on_both_sides(self, k: int, members: Sequence[int]) -> bool:
        """Is ``k`` read by what leads to a row's sum and by what follows it? That has no elements of the row."""
        for m in members:
            each = self.defs[m]
            if isinstance(each, Rows) and 0 not in each.mapped:
                before = {m, *self._feeding(m, members)}
                return len({u in before for u in self.users[k]}) > 1
        return False

    def _feeding(self, anchor: int, members: Sequence[int]) -> set[int]:
        """Members whose results flow into the anchor."""
        feeding: set[int] = set()
        stack = [anchor]
        while stack:
            for m in self.makers[stack.pop()]:
                if m in members and m not in feeding:
                    feeding.add(m)
                    stack.append(m)
        return feeding

    def _plain(self, members: Sequence[int]) -> bool:
        """Members see each other's results as they are, not under another shape."""
        made = {v for m in members for v in self.defs[m].outputs}
        return not any(
            use.shape is not None and use.value in made
            for m in members
            if isinstance(each := self.defs[m], Pointwise | Rows)
            for use in each.uses
        )

    def _feeds_row(self, row: Rows, shape: tuple[int, ...], members: Sequence[int]) -> bool:
        """May these be computed inside the row's loops? Only as plain operands, and cheap ones where there are
        several stages that would each compute them again."""
        made = {self.defs[m].out for m in members}
        if made & set(row.sources):
            return False
        for use in row.uses:
            if use.value in made and (use.shape is not None or shape != row.domain):
                return False
        stages = _stages(row, self.program)
        return stages == 1 or not any(self._dear(self.defs[m]) for m in members)

    def _dear(self, each: Def) -> bool:
        if not isinstance(each, Pointwise):
            return True
        return bool(operations(each, self.program) & _DEAR)


def operations(each: Pointwise, program: Definitions) -> set[str]:
    """Names of the operations in a pointwise definition."""
    found: set[str] = set()
    stack: list[Expr] = [each.compute([Load(k, program.dtype(u.value)) for k, u in enumerate(each.uses)])]
    while stack:
        item = stack.pop()
        if isinstance(item, Op):
            found.add(item.name)
            stack.extend(item.args)
    return found


def _stages(row: Rows, program: Definitions) -> int:
    values = [*(u.value for u in row.uses), *row.sources]
    body = row.build([Load(k, program.dtype(v)) for k, v in enumerate(values)])
    return len(body.reduces) + bool(body.maps)
