"""Full matches of RE2 patterns in time linear in the text.

RegexFullMatch takes RE2's syntax, and a model may come with any pattern. Python's ``re`` backtracks, so a short hostile
pattern could hang a process; and it reads several RE2 constructs differently. Since only "does all of it match" is
asked, groups and greediness do not matter: the pattern becomes a nondeterministic automaton (:class:`_Program`), and
its deterministic states are built while text is read and kept for the next time (:class:`FullMatcher`).

The parser stands in :mod:`ranvier.ops.text.regex_syntax`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from functools import lru_cache

from ranvier.errors import InvalidValue
from ranvier.ops.text.regex_syntax import (
    Alternation,
    Anchor,
    AnchorKind,
    CharSet,
    Concatenation,
    Repetition,
    Tree,
    is_word_char,
    parse,
)

MAX_PROGRAM = 20_000  # instructions; counted repetitions multiply, so a short pattern can ask for many
MAX_KEPT = 200_000  # places in the states one matcher keeps, plus the steps between them


@lru_cache(maxsize=64)
def full_matcher(pattern: str) -> FullMatcher:
    """The matcher of an RE2 pattern; InvalidValue says where the pattern is wrong."""
    return FullMatcher(_Program(parse(pattern)))


class _Code(Enum):
    CHAR = auto()  # one character of `char_set`, then `target`
    SPLIT = auto()  # `target` or `other`
    ASSERT = auto()  # `anchor` must hold here, then `target`
    MATCH = auto()


class _Instruction:
    __slots__ = ("anchor", "char_set", "code", "other", "target")

    def __init__(self, code: _Code, char_set: CharSet | None = None, anchor: AnchorKind | None = None) -> None:
        self.code = code
        self.char_set = char_set
        self.anchor = anchor
        self.target = self.other = -1


class _Program:
    """A pattern as instructions, in the manner of Thompson. Execution starts at instruction 0."""

    def __init__(self, tree: Tree) -> None:
        self.instructions: list[_Instruction] = []
        self._emit_tree(tree)
        self._emit(_Instruction(_Code.MATCH))
        self.has_anchors = any(i.code is _Code.ASSERT for i in self.instructions)

    def _emit(self, instruction: _Instruction) -> _Instruction:
        """Append an instruction that continues with the one behind it."""
        if len(self.instructions) >= MAX_PROGRAM:
            raise InvalidValue(f"RegexFullMatch: the pattern needs more than {MAX_PROGRAM} states")
        self.instructions.append(instruction)
        instruction.target = len(self.instructions)
        return instruction

    def _emit_tree(self, tree: Tree) -> None:
        if isinstance(tree, CharSet):
            self._emit(_Instruction(_Code.CHAR, char_set=tree))
        elif isinstance(tree, Anchor):
            self._emit(_Instruction(_Code.ASSERT, anchor=tree.kind))
        elif isinstance(tree, Concatenation):
            for part in tree.parts:
                self._emit_tree(part)
        elif isinstance(tree, Alternation):
            self._emit_alternation(tree)
        else:
            self._emit_repetition(tree)

    def _emit_alternation(self, tree: Alternation) -> None:
        *firsts, last = tree.branches
        exits = []
        for branch in firsts:
            split = self._emit(_Instruction(_Code.SPLIT))
            self._emit_tree(branch)
            exits.append(self._emit(_Instruction(_Code.SPLIT)))
            split.other = len(self.instructions)
        self._emit_tree(last)
        for leave in exits:
            leave.target = leave.other = len(self.instructions)

    def _emit_repetition(self, tree: Repetition) -> None:
        for _ in range(tree.least):
            self._emit_tree(tree.body)
        if tree.most is None:
            at = len(self.instructions)
            split = self._emit(_Instruction(_Code.SPLIT))
            self._emit_tree(tree.body)
            back = self._emit(_Instruction(_Code.SPLIT))
            back.target = back.other = at
            split.other = len(self.instructions)
            return
        splits = []
        for _ in range(tree.most - tree.least):
            splits.append(self._emit(_Instruction(_Code.SPLIT)))
            self._emit_tree(tree.body)
        for split in splits:
            split.other = len(self.instructions)


class _State:
    """A deterministic state: where the program may stand, and what came just before."""

    __slots__ = ("following", "matches_at_end", "places", "previous")

    def __init__(self, places: frozenset[int], previous: str) -> None:
        self.places = places
        self.previous = previous  # a representative of the last character, "" at the start; anchors look at it
        self.following: dict[str, _State] = {}
        self.matches_at_end: bool | None = None


class FullMatcher:
    """Calling it with a text tells whether all of the text matches."""

    def __init__(self, program: _Program) -> None:
        self._program = program
        self._forget()

    def __call__(self, text: str) -> bool:
        state = self._start
        for char in text:
            following = state.following.get(char)
            state = self._step(state, char) if following is None else following
            if not state.places:
                return False
        if state.matches_at_end is None:
            last = len(self._program.instructions) - 1
            state.matches_at_end = last in self._reachable(state, "")
        return state.matches_at_end

    def _forget(self) -> None:
        self._states: dict[tuple[frozenset[int], str], _State] = {}
        self._kept = 0
        self._start = self._state(frozenset({0}), "")

    def _state(self, places: Iterable[int], previous: str) -> _State:
        key = (frozenset(places), previous)
        found = self._states.get(key)
        if found is None:
            found = self._states.setdefault(key, _State(*key))
            self._kept += len(found.places)
        return found

    def _step(self, state: _State, char: str) -> _State:
        if self._kept >= MAX_KEPT:
            self._forget()  # a pattern with very many states stays linear in the text, only slower
        instructions = self._program.instructions
        admits: dict[int, bool] = {}  # the copies a repetition makes share one set: ask each set once
        places = set()
        for place in self._reachable(state, char):
            char_set = instructions[place].char_set
            if char_set is None:
                continue
            admitted = admits.get(id(char_set))
            if admitted is None:
                admitted = admits[id(char_set)] = char in char_set
            if admitted:
                places.add(instructions[place].target)
        following = self._state(places, self._kind(char))
        state.following[char] = following
        self._kept += 1
        return following

    def _kind(self, char: str) -> str:
        """A representative of all characters that anchors cannot tell from ``char``."""
        if not self._program.has_anchors:
            return ""
        if char == "\n":
            return char
        return "w" if is_word_char(char) else " "

    def _reachable(self, state: _State, char: str) -> set[int]:
        """All places reached without reading, between ``state.previous`` and ``char`` ("" at the end of the text)."""
        seen: set[int] = set()
        pending = list(state.places)
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            instruction = self._program.instructions[place]
            if instruction.code is _Code.SPLIT:
                pending += (instruction.target, instruction.other)
            elif instruction.anchor is not None and _holds(instruction.anchor, state.previous, char):
                pending.append(instruction.target)
        return seen


def _holds(anchor: AnchorKind, before: str, after: str) -> bool:
    if anchor is AnchorKind.TEXT_START:
        return before == ""
    if anchor is AnchorKind.TEXT_END:
        return after == ""
    if anchor is AnchorKind.LINE_START:
        return before in ("", "\n")
    if anchor is AnchorKind.LINE_END:
        return after in ("", "\n")
    at_boundary = is_word_char(before) != is_word_char(after)
    return at_boundary == (anchor is AnchorKind.WORD_BOUNDARY)
