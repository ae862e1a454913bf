"""Pickles read as data: an interpreter of the few opcodes that checkpoints use, which calls nothing.

A pickle is a program. Here its stack holds plain values and :class:`Call` records of what the program would have
called; the reader of a format decides what a record means, and an opcode or a global outside the lists is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
from typing import IO, Any

from ranvier.errors import WeightError
from ranvier.records import dataclass

_MOST_OPCODES = 20_000_000


@dataclass(frozen=True)
class Global:
    """The name of something importable, which is never imported."""

    name: str


@dataclass(frozen=True)
class Call:
    """What the program would have called, and with what."""

    function: str
    arguments: tuple[Any, ...]


class Attributes(dict[str, Any]):
    """An object of a class that a format knows to be made of its attributes, and those."""


_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING",
    "SHORT_BINSTRING", "STRING", "BYTEARRAY8",
}  # fmt: skip
_LONGEST_INTEGER = 128  # bits; one of a million takes long to write
_KEYS = (str, bytes, int, float, bool, type(None), Global)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def read_pickle(
    stream: IO[bytes],
    label: str,
    call: Callable[[str, tuple[Any, ...]], Any],
    persistent: Callable[[Any], Any],
) -> Any:
    """The value of the pickle at the stream's position, which is left behind it.

    ``call`` turns a called name and its arguments into a value; ``persistent`` does so with a persistent id.
    """
    try:
        return _Machine(label, call, persistent).run(stream)
    except WeightError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightError(f"{label}: the pickle is not sound: {error!r}") from None


class _Machine:
    def __init__(
        self, label: str, call: Callable[[str, tuple[Any, ...]], Any], persistent: Callable[[Any], Any]
    ) -> None:
        self.label, self.call, self.persistent = label, call, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []  # how many values the stack had at each: to look for them would take long
        self.memo: dict[int, Any] = {}

    def run(self, stream: IO[bytes]) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            name = opcode.name
            if count > _MOST_OPCODES:
                raise WeightError(f"{self.label}: the pickle has more than {_MOST_OPCODES} instructions")
            if name == "STOP":
                if self.marks:
                    raise ValueError("a mark that nothing was done with")
                (value,) = self.stack
                return value
            self.step(name, argument)
        raise WeightError(f"{self.label}: the pickle is cut off")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = self.top()
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[int(argument)])
        elif name == "POP_MARK" or (name == "POP" and self.marks and self.marks[-1] == len(stack)):
            self.above_mark()
        elif name == "POP":
            stack.pop()
        else:
            self.build(name, argument)

    def build(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}[name]())
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            stack.append((tuple if name == "TUPLE" else list)(self.above_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack.append(tuple(self.pop() for _ in range(count))[::-1])
        elif name == "DICT":
            stack.append(_pairs(self.above_mark()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [self.pop()] if name == "APPEND" else self.above_mark()
            self.expect(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.above_mark()
            self.expect(dict).update(_pairs(pairs))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ", 1) if name == "GLOBAL" else (self.pop(), self.pop())[::-1]
            stack.append(Global(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = self.pop(), self.pop()
            if not isinstance(function, Global) or not isinstance(arguments, tuple):
                raise WeightError(f"{self.label}: the pickle calls something that is not a name")
            stack.append(self.call(function.name, arguments))
        elif name == "BUILD":
            state = self.pop()  # attributes of an object; those of a dictionary are notes, which nobody needs
            target = self.top()
            if isinstance(target, Attributes) and isinstance(state, dict):
                target.update(mapping(state.items()))
        elif name in ("BINPERSID", "PERSID"):
            stack.append(self.persistent(self.pop() if name == "BINPERSID" else argument))
        else:
            raise WeightError(f"{self.label}: the pickle has the instruction {name}, which checkpoints do not need")

    def top(self) -> Any:
        if len(self.stack) == (self.marks[-1] if self.marks else 0):
            raise ValueError("an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def above_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def expect(self, kind: type) -> Any:
        found = self.top()
        if type(found) is not kind:
            raise TypeError(f"{kind.__name__} expected, {type(found).__name__} found")
        return found


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return mapping(zip(items[::2], items[1::2]))


def mapping(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dictionary whose keys are plain values or tuples of them.

    A tuple that holds another twice, which holds another twice ... is short to write and takes for ever to hash.
    """
    found = {}
    for key, value in pairs:
        for each in key if isinstance(key, tuple) else (key,):
            if not isinstance(each, _KEYS) or (isinstance(each, int) and each.bit_length() > _LONGEST_INTEGER):
                raise ValueError(f"a key that is or holds {shown(each)}")
        found[key] = value
    return found


def shown(value: Any) -> str:
    """A value for a message: what holds others is told by its type alone, for the reason given at ``mapping``."""
    text = repr(value) if isinstance(value, str | float | bool | None) else ""
    if isinstance(value, Global):
        text = value.name
    if type(value) is int and value.bit_length() <= _LONGEST_INTEGER:
        text = str(value)
    return f"{text[:100]} ..." if len(text) > 100 else text or type(value).__name__
