"""The syntax of RE2 patterns, read into a small tree.

Only what decides a full match is kept: groups become their content, greedy and lazy repetitions are the same.
Constructs RE2 does not have (look-around, back-references, possessive repetitions) are errors here too.
"""

from __future__ import annotations

import string
import unicodedata
from enum import Enum, auto
from typing import NoReturn

from ranvier.errors import InvalidValue, NotSupported
from ranvier.records import dataclass

MAX_REPEAT = 1000  # RE2's own limit for {n,m}
MAX_NESTING = 150
_LAST_CODE = 0x10FFFF


class AnchorKind(Enum):
    TEXT_START = auto()
    TEXT_END = auto()
    LINE_START = auto()
    LINE_END = auto()
    WORD_BOUNDARY = auto()
    NO_WORD_BOUNDARY = auto()


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of a set: code ranges, Unicode categories and nested sets, all together or negated."""

    ranges: tuple[range, ...] = ()
    categories: tuple[str, ...] = ()
    nested: tuple[CharSet, ...] = ()
    negated: bool = False
    ignore_case: bool = False

    def __contains__(self, char: str) -> bool:
        variants = {char}
        if self.ignore_case:
            # characters whose other case has several letters (ß) have no simple variant
            variants |= {v for v in (char.lower(), char.upper(), char.casefold()) if len(v) == 1}
            variants |= {v.upper() for v in list(variants) if len(v.upper()) == 1}
        return any(map(self._has, variants)) != self.negated

    def _has(self, char: str) -> bool:
        code = ord(char)
        if any(code in r for r in self.ranges) or any(char in inner for inner in self.nested):
            return True
        return bool(self.categories) and unicodedata.category(char).startswith(self.categories)


@dataclass(frozen=True, slots=True)
class Anchor:
    kind: AnchorKind


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    branches: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    body: Tree
    least: int
    most: int | None  # None: without end


Tree = CharSet | Anchor | Concatenation | Alternation | Repetition


def parse(pattern: str) -> Tree:
    """The tree of an RE2 pattern; InvalidValue says what is wrong with it and where."""
    return _Parser(pattern).parse()


def is_word_char(char: str) -> bool:
    """RE2's ``\\w`` and ``\\b`` know ASCII only; the empty string stands for an edge of the text."""
    return char != "" and char in _WORD_CHARS


def _span(first: str, last: str) -> range:
    return range(ord(first), ord(last) + 1)


def _chars(chars: str) -> tuple[range, ...]:
    return tuple(_span(c, c) for c in chars)


_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_")
_DIGITS, _LOWER, _UPPER = _span("0", "9"), _span("a", "z"), _span("A", "Z")
_WORD = (_DIGITS, _LOWER, _UPPER, *_chars("_"))
_PERL_CLASSES = {"d": (_DIGITS,), "s": _chars("\t\n\f\r "), "w": _WORD}
_POSIX_CLASSES = {
    "alnum": (_DIGITS, _LOWER, _UPPER),
    "alpha": (_LOWER, _UPPER),
    "ascii": (range(0x80),),
    "blank": _chars("\t "),
    "cntrl": (range(0x20), *_chars("\x7f")),
    "digit": (_DIGITS,),
    "graph": (_span("!", "~"),),
    "lower": (_LOWER,),
    "print": (_span(" ", "~"),),
    "punct": _chars(string.punctuation),
    "space": _chars("\t\n\v\f\r "),
    "upper": (_UPPER,),
    "word": _WORD,
    "xdigit": (_DIGITS, _span("a", "f"), _span("A", "F")),
}
_ESCAPED_CHARS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPED_ANCHORS = {
    "A": AnchorKind.TEXT_START,
    "z": AnchorKind.TEXT_END,
    "b": AnchorKind.WORD_BOUNDARY,
    "B": AnchorKind.NO_WORD_BOUNDARY,
}
_CATEGORIES = frozenset(
    ["C", "L", "M", "N", "P", "S", "Z", "Cc", "Cf", "Co", "Cs", "Ll", "Lm", "Lo", "Lt", "Lu", "Mc", "Me", "Mn"]
    + ["Nd", "Nl", "No", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs"]
)


@dataclass(frozen=True, slots=True)
class _Flags:
    ignore_case: bool = False  # (?i)
    multi_line: bool = False  # (?m)
    dot_all: bool = False  # (?s)


class _Group:
    """What has been read of one parenthesis: finished branches, the branch at hand, and the flags outside."""

    def __init__(self, outer_flags: _Flags) -> None:
        self.outer_flags = outer_flags
        self.branches: list[Tree] = []
        self.parts: list[Tree] = []
        self.repeatable = False  # whether a repetition may follow

    def add(self, part: Tree) -> None:
        self.parts.append(part)
        self.repeatable = True

    def end_branch(self) -> None:
        self.branches.append(self.parts[0] if len(self.parts) == 1 else Concatenation(tuple(self.parts)))
        self.parts = []
        self.repeatable = False

    def tree(self) -> Tree:
        self.end_branch()
        return self.branches[0] if len(self.branches) == 1 else Alternation(tuple(self.branches))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.flags = _Flags()
        self.group = _Group(self.flags)
        self.outer: list[_Group] = []

    def parse(self) -> Tree:
        while self.at < len(self.pattern):
            self._read_one()
        if self.outer:
            self._fail("missing )")
        return self.group.tree()

    # -- the text of the pattern ------------------------------------------------------------------------------------

    def _take(self, text: str) -> bool:
        """Consume ``text`` when it comes next."""
        found = self.pattern.startswith(text, self.at)
        if found:
            self.at += len(text)
        return found

    def _next(self) -> str:
        if self.at == len(self.pattern):
            self._fail("unexpected end")
        self.at += 1
        return self.pattern[self.at - 1]

    def _until(self, end: str) -> str:
        found = self.pattern.find(end, self.at)
        if found < 0:
            self._fail(f"missing {end}")
        text = self.pattern[self.at : found]
        self.at = found + len(end)
        return text

    def _fail(self, why: str) -> NoReturn:
        raise InvalidValue(f"RegexFullMatch: {why} at position {self.at} of pattern {self.pattern!r}")

    # -- outside of character classes -------------------------------------------------------------------------------

    def _read_one(self) -> None:
        char = self._next()
        if char == "(":
            self._open_group()
        elif char == ")":
            self._close_group()
        elif char == "|":
            self.group.end_branch()
        elif char in "*+?":
            self._repeat(*{"*": (0, None), "+": (1, None), "?": (0, 1)}[char])
        elif char == "{" and (bounds := self._repeat_bounds()) is not None:
            self._repeat(*bounds)
        elif char == "[":
            self.group.add(self._char_class())
        elif char == ".":
            self.group.add(CharSet(() if self.flags.dot_all else _chars("\n"), negated=True))
        elif char == "^":
            self.group.add(Anchor(AnchorKind.LINE_START if self.flags.multi_line else AnchorKind.TEXT_START))
        elif char == "$":
            self.group.add(Anchor(AnchorKind.LINE_END if self.flags.multi_line else AnchorKind.TEXT_END))
        elif char == "\\":
            self._escape_outside_class()
        else:
            self.group.add(self._literal(char))

    def _literal(self, char: str) -> CharSet:
        return CharSet(_chars(char), ignore_case=self.flags.ignore_case)

    def _open_group(self) -> None:
        if len(self.outer) >= MAX_NESTING:
            self._fail(f"more than {MAX_NESTING} nested groups")
        flags = self.flags
        if self._take("?"):
            if self._take("P<") or self._take("<"):
                self._group_name()
            else:
                flags, opens = self._read_flags()
                if not opens:
                    self.flags = flags
                    self.group.repeatable = bool(self.group.parts)  # RE2 reads a(?i)* as a*
                    return
        self.outer.append(self.group)
        self.group = _Group(self.flags)
        self.flags = flags

    def _group_name(self) -> None:
        name = self._until(">")
        if not name or not all(c == "_" or c.isalnum() for c in name):
            self._fail(f"{name!r} is not a group name")

    def _close_group(self) -> None:
        if not self.outer:
            self._fail("unexpected )")
        inner = self.group
        self.flags = inner.outer_flags
        self.group = self.outer.pop()
        self.group.add(inner.tree())

    def _read_flags(self) -> tuple[_Flags, bool]:
        """Flags after ``(?``, and whether ``:`` follows and opens a group."""
        values = {"i": self.flags.ignore_case, "m": self.flags.multi_line, "s": self.flags.dot_all, "U": False}
        value, complete = True, True  # a minus sign wants a flag behind it
        while True:
            char = self._next()
            if char in values:
                values[char] = value
                complete = True
            elif char == "-" and value:
                value, complete = False, False
            elif char in ":)" and complete:
                return _Flags(values["i"], values["m"], values["s"]), char == ":"
            else:
                self._fail(f"RE2 has no group of kind (?{char}")

    def _repeat_bounds(self) -> tuple[int, int | None] | None:
        """The numbers of ``{n}``, ``{n,}`` or ``{n,m}``; None when the brace is an ordinary character."""
        end = self.pattern.find("}", self.at)
        least, comma, most = self.pattern[self.at : end if end >= 0 else self.at].partition(",")
        if not _is_number(least) or (most != "" and not _is_number(most)):
            return None
        low = int(least)
        high = int(most) if most else (None if comma else low)
        if low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
            self._fail(f"repetition counts must rise and be at most {MAX_REPEAT}")
        self.at = end + 1
        return low, high

    def _repeat(self, least: int, most: int | None) -> None:
        if not self.group.repeatable:
            self._fail("nothing to repeat")
        self.group.parts.append(Repetition(self.group.parts.pop(), least, most))
        self._take("?")  # lazy: the same for a full match
        self.group.repeatable = False

    def _escape_outside_class(self) -> None:
        char = self._next()
        if char in _ESCAPED_ANCHORS:
            self.group.add(Anchor(_ESCAPED_ANCHORS[char]))
        elif char == "Q":
            end = self.pattern.find("\\E", self.at)
            for quoted in self.pattern[self.at :] if end < 0 else self.pattern[self.at : end]:
                self.group.add(self._literal(quoted))
            self.at = len(self.pattern) if end < 0 else end + 2
        elif char == "C":
            raise NotSupported(f"RegexFullMatch: \\C (one byte) in pattern {self.pattern!r}; texts are Unicode here")
        else:
            self.group.add(self._class_escape(char) or self._literal(self._char_escape(char)))

    # -- escapes that may also stand in character classes -----------------------------------------------------------

    def _class_escape(self, char: str) -> CharSet | None:
        """The set that ``\\char`` names, or None where it is a single character."""
        if char.lower() in _PERL_CLASSES:
            return CharSet(_PERL_CLASSES[char.lower()], negated=char.isupper(), ignore_case=self.flags.ignore_case)
        if char not in "pP":
            return None
        name = self._until("}") if self._take("{") else self._next()
        negated = (char == "P") != name.startswith("^")
        name = name.removeprefix("^")
        if name == "Any":
            return CharSet((range(_LAST_CODE + 1),), negated=negated)
        if name not in _CATEGORIES:
            raise NotSupported(f"RegexFullMatch: \\p{{{name}}} in pattern {self.pattern!r} is no Unicode category")
        categories = ("Cc", "Cf", "Co", "Cs") if name == "C" else (name,)  # RE2 knows no unassigned characters
        return CharSet(categories=categories, negated=negated, ignore_case=self.flags.ignore_case)

    def _char_escape(self, char: str) -> str:
        """The character that ``\\char`` stands for."""
        if char in _ESCAPED_CHARS:
            return _ESCAPED_CHARS[char]
        if char == "x":
            digits = self._until("}") if self._take("{") else self._next() + self._next()
            if not digits or not set(digits) <= set(string.hexdigits) or int(digits, 16) > _LAST_CODE:
                self._fail(f"\\x{digits} is not a character")
            return chr(int(digits, 16))
        if char in string.octdigits:
            digits = char
            while len(digits) < 3 and self.pattern[self.at : self.at + 1] in tuple(string.octdigits):
                digits += self._next()
            if digits in "1234567":
                self._fail("RE2 has no back-references")
            return chr(int(digits, 8))
        if char.isascii() and not char.isalnum():
            return char
        self._fail(f"RE2 has no escape \\{char}")

    def _char_class(self) -> CharSet:
        negated = self._take("^")
        ranges: list[range] = []
        nested: list[CharSet] = []
        first = True
        while first or not self._take("]"):
            first = False
            if self._take("[:"):
                nested.append(self._posix_class())
                continue
            low = self._class_member()
            if isinstance(low, CharSet):
                nested.append(low)
                continue
            high: str | CharSet = low
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self._class_member()
            if isinstance(high, CharSet) or high < low:
                self._fail("bad character range")
            ranges.append(_span(low, high))
        return CharSet(tuple(ranges), nested=tuple(nested), negated=negated, ignore_case=self.flags.ignore_case)

    def _class_member(self) -> str | CharSet:
        char = self._next()
        if char != "\\":
            return char
        escaped = self._next()
        return self._class_escape(escaped) or self._char_escape(escaped)

    def _posix_class(self) -> CharSet:
        negated = self._take("^")
        name = self._until(":]")
        if name not in _POSIX_CLASSES:
            self._fail(f"unknown character class [:{name}:]")
        return CharSet(_POSIX_CLASSES[name], negated=negated, ignore_case=self.flags.ignore_case)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
