"""A call from Python to a program without Python in between: a function of the interpreter's own kind, in native code.

What it is given is a dictionary of inputs. It looks whether they are the arrays that the program was made for, makes
the outputs, runs the program, and returns a dictionary. It returns None, and nothing has happened, where this is
another call, and whoever called goes the long way then. So it does where data are refused: the long way knows the words
for that. Other threads of Python run meanwhile, unless the program is done before one of them would have begun.

One function serves all entries. It finds what it needs in words of its own, which belong to one entry, and so does the
memory that the program works in: a second thread that comes while the first is in the program gets None too. That is
seen, and written, while no other thread of Python runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import atomics, objects
from ranvier.codegen.llvm.builder import Module, Val, Var
from ranvier.codegen.llvm.driver import run_spec
from ranvier.codegen.llvm.isa import available
from ranvier.codegen.llvm.library import Kernel, kernels
from ranvier.codegen.llvm.program import FIRST_INPUT, NativeProgram, OwnCall
from ranvier.codegen.signature import Constant, Tensor

Array = np.ndarray[Any, Any]
_VERSION = 4  # of the code below: part of its key

# The words of an entry.
_BUSY, _RUNS, _INTERPRETER, _DRIVER, _PROGRAM, _CALL, _TABLE, _HELD = range(8)
_TAKES, _TAKE_COUNT, _DRAWS, _DRAW_COUNT, _GIVES, _GIVE_COUNT, _FLAGS, _FLAG_COUNT, _LETS, _WORDS = range(8, 18)
# A tensor that is taken or given. SOURCE and BYTES are of a constant that is given, 0 for what the program makes.
_NAME, _DTYPE, _RANK, _SHAPE, _PLACE, _SOURCE, _BYTES, _TENSOR_WORDS = range(8)
_DRAW, _DRAW_PLACE, _DRAW_WORDS = range(3)
_METH_O = 8  # a function of one argument


class Entry:
    """``run(inputs)`` gives the outputs or None. The arena at the address is this entry's own until ``close``."""

    __slots__ = ("_words", "run")

    def __init__(
        self,
        program: NativeProgram,
        arena: int,
        takes: Sequence[Tensor],
        draws: Sequence[tuple[Callable[[], Array], int]],
        gives: Sequence[Tensor | Constant],
        flags: Sequence[int],
        keep: object,
        *,
        lets: bool = True,
    ) -> None:
        """Places are among the arrays of the program, inputs and then outputs. ``draws``: what makes an input before
        every run, and its place; ``flags``: addresses of bytes that tell that data were refused; ``keep``: what has to
        live as long as this; ``lets``: other threads of Python run meanwhile."""
        interpreter = objects.interpreter()
        assert interpreter is not None
        call = OwnCall(program, arena)
        nowhere = program.bases - FIRST_INPUT
        sizes = [np.array(x.shape, np.int64) for x in (*takes, *gives)]
        records = np.array([_record(x, _start(at), nowhere) for x, at in zip((*takes, *gives), sizes)], np.int64)
        taken, given = records[: len(takes)], records[len(takes) :]
        drawn = np.array([(id(make), place) for make, place in draws], np.int64)
        told = np.array(flags, np.int64)
        held = np.zeros(len(takes) + len(draws) + len(gives), np.int64)
        words = self._words = np.zeros(_WORDS, np.int64)
        words[_INTERPRETER], words[_HELD] = _start(interpreter), _start(held)
        words[_DRIVER], words[_PROGRAM], words[_CALL] = call.function, call.program, call.words
        words[_TABLE], words[_LETS] = call.table, lets
        for at, many in ((_TAKES, taken), (_DRAWS, drawn), (_GIVES, given), (_FLAGS, told)):
            words[at], words[at + 1] = _start(many), len(many)
        kept = (keep, call, held, records, drawn, told, sizes, tuple(takes), tuple(draws), tuple(gives))
        self.run: Callable[[Any], dict[str, Array] | None] = _method(words, kept)

    @property
    def busy(self) -> bool:
        return bool(self._words[_BUSY])

    @property
    def runs(self) -> int:
        return int(self._words[_RUNS])

    def close(self) -> bool:
        """Takes the entry out of use, if no run is in it: its arena is free then."""
        return self.run(self._words) is not None


def _start(array: Array) -> int:
    return int(array.ctypes.data)


def _record(x: Tensor | Constant, sizes: int, nowhere: int) -> tuple[int, ...]:
    if isinstance(x, Constant):
        return id(x.name), id(x.dtype), len(x.shape), sizes, nowhere, _start(x.array), x.array.nbytes
    return id(x.name), id(x.dtype), len(x.shape), sizes, nowhere if x.place is None else x.place, 0, 0


class _MethodDef(ctypes.Structure):
    """What the interpreter knows a function in native code by."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@functools.cache
def prepared() -> bool:
    """Compiles what entries need, all at once, and once in a process: whoever makes programs does so before, because
    the first call that is let in by an entry should not wait for it. False where there are no entries."""
    return objects.interpreter() is not None and bool(_compiled())


@functools.cache
def _compiled() -> dict[KernelSpec, Kernel]:
    return kernels([entry_spec(), *(run_spec(lists=lists) for lists in (False, True))], available()[-1])


@functools.cache
def _definition() -> tuple[_MethodDef, Any]:
    """The function, and what makes an object of it, its own one, and one that lives as long."""
    kinds = (ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    make = ctypes.PYFUNCTYPE(*kinds)(("PyCFunction_NewEx", ctypes.pythonapi))
    return _MethodDef(b"run", _compiled()[entry_spec()].address, _METH_O, None), make


def _method(own: Array, kept: object) -> Any:
    definition, make = _definition()
    return make(ctypes.addressof(definition), own, kept)


@functools.cache
def entry_spec() -> KernelSpec:
    """``PyObject *run(PyObject *own, PyObject *inputs)``: ``own`` is an array, the words of the entry. Given instead of
    inputs, it takes the entry out of use."""
    return KernelSpec("entry from Python", ("entry", _VERSION), lambda m, s, isa: _Writer(m, s).emit())


class _Writer:
    def __init__(self, module: Module, symbol: str) -> None:
        f = self.f = module.function(symbol, [("i64", "own"), ("i64", "inputs")], "i64")
        self.words = f.load("ptr", f.gep(atomics.pointer(f, f.args["own"]), objects.ARRAY_DATA))
        self.interpreter = f.load("ptr", f.gep(self.words, 8 * _INTERPRETER))
        self.inputs = f.args["inputs"]
        self.held, self.table = (f.load("ptr", f.gep(self.words, 8 * k)) for k in (_HELD, _TABLE))
        self.takes, self.draws, self.gives = (self.word(k) for k in (_TAKE_COUNT, _DRAW_COUNT, _GIVE_COUNT))

    def word(self, index: int) -> Val:
        return self.f.load("i64", self.f.gep(self.words, 8 * index))

    def known(self, name: str) -> Val:
        """An object, or the address of a function."""
        return self.f.load("i64", self.f.gep(self.interpreter, 8 * objects.WORDS[name]))

    def call(self, name: str, ret: str, *args: Val) -> Val:
        return self.f.call_pointer(atomics.pointer(self.f, self.known(name)), ret, args)

    def part(self, table: int, k: Val, words: int) -> Val:
        """The address of one record of a table."""
        return self.f.gep(atomics.pointer(self.f, self.word(table)), k * (8 * words))

    def of(self, record: Val, index: int) -> Val:
        return self.f.load("i64", self.f.gep(record, 8 * index))

    def field(self, object_: Val, offset: int, kind: str = "i64") -> Val:
        return self.f.load(kind, self.f.gep(atomics.pointer(self.f, object_), offset))

    def emit(self) -> None:
        f = self.f
        result = f.var("i64", self.known("none"))
        with f.if_(f.cmp("eq", self.word(_BUSY), 0)), f.if_else(f.cmp("eq", self.inputs, f.args["own"])) as other:
            self.busy(1)
            result.set(self.known("true"))
            other()
            self.run(result)
        whole = f.or_(f.cmp("eq", result.get(), self.known("none")), f.cmp("eq", result.get(), self.known("true")))
        with f.if_(whole):
            self.call("Py_IncRef", "void", result.get())
        f.ret(result.get())

    def busy(self, value: int) -> None:
        self.f.store(self.f.i64(value), self.f.gep(self.words, 8 * _BUSY))

    def run(self, result: Var) -> None:
        f = self.f
        with (
            f.if_(f.cmp("eq", self.field(self.inputs, objects.TYPE), self.known("dict"))),
            f.if_(f.cmp("eq", self.call("PyDict_Size", "i64", self.inputs), self.takes)),
        ):
            self.busy(1)  # from here on code in Python may run, and other threads
            good, count = f.var("i1", 1), f.var("i64", 0)
            with f.loop(0, self.takes) as k, f.if_(good.get()):
                good.set(self.fits(k, count))
            with f.if_(good.get()):
                self.make(result, count)
            with f.loop(0, count.get()) as k:
                self.call("Py_DecRef", "void", f.load("i64", f.gep(self.held, k, "i64")))
            self.busy(0)

    def fits(self, k: Val, count: Var) -> Val:
        """Looks at an input, holds it and writes down where it is."""
        f = self.f
        wanted = self.part(_TAKES, k, _TENSOR_WORDS)
        found = self.call("PyDict_GetItem", "i64", self.inputs, self.of(wanted, _NAME))
        good = f.var("i1", 0)
        with f.if_(f.cmp("ne", found, 0)), f.if_(self.is_plain(found)):
            rank = self.of(wanted, _RANK)
            same_rank = f.cmp("eq", f.cast(self.field(found, objects.ARRAY_RANK, "i32"), "i64"), rank)
            good.set(f.and_(same_rank, f.cmp("eq", self.field(found, objects.ARRAY_DTYPE), self.of(wanted, _DTYPE))))
            with f.if_(good.get()):
                sizes = [
                    atomics.pointer(f, x) for x in (self.field(found, objects.ARRAY_SHAPE), self.of(wanted, _SHAPE))
                ]
                with f.loop(0, rank) as d:
                    size, expected = (f.load("i64", f.gep(each, d, "i64")) for each in sizes)
                    good.set(f.and_(good.get(), f.cmp("eq", size, expected)))
                self.call("Py_IncRef", "void", found)
                self.hold(found, count)
                self.place(found, self.of(wanted, _PLACE))
        return good.get()

    def is_plain(self, found: Val) -> Val:
        """An array as programs read it?"""
        f = self.f
        good = f.var("i1", f.cmp("eq", self.field(found, objects.TYPE), self.known("array")))
        with f.if_(good.get()):
            flags = f.and_(self.field(found, objects.ARRAY_FLAGS, "i32"), objects.PLAIN)
            good.set(f.cmp("eq", flags, objects.PLAIN))
        return good.get()

    def hold(self, found: Val, count: Var) -> None:
        """Keeps a reference, which is ours, until the end."""
        self.f.store(found, self.f.gep(self.held, count.get(), "i64"))
        count.set(count.get() + 1)

    def place(self, found: Val, place: Val) -> None:
        self.f.store(self.field(found, objects.ARRAY_DATA), self.f.gep(self.table, place, "i64"))

    def make(self, result: Var, count: Var) -> None:
        """From inputs that fit to the outputs; ``result`` stays where there are none, and is 0 for an error."""
        f = self.f
        good = f.var("i1", 1)
        with f.loop(0, self.draws) as k, f.if_(good.get()):
            record = self.part(_DRAWS, k, _DRAW_WORDS)
            drawn = self.call("PyObject_CallNoArgs", "i64", self.of(record, _DRAW))
            with f.if_else(f.cmp("eq", drawn, 0)) as other:
                good.set(0)
                result.set(0)
                other()
                self.hold(drawn, count)
                good.set(self.is_plain(drawn))
                self.place(drawn, self.of(record, _DRAW_PLACE))
        first = f.var("i64", count.get())
        with f.loop(0, self.gives) as k, f.if_(good.get()):
            made = self.output(self.part(_GIVES, k, _TENSOR_WORDS))
            with f.if_else(f.cmp("eq", made, 0)) as other:
                self.call("PyErr_Clear", "void")
                good.set(0)
                other()
                self.hold(made, count)
        with f.if_(good.get()):
            state, lets = f.var("i64", 0), f.cmp("ne", self.word(_LETS), 0)
            with f.if_(lets):
                state.set(self.call("PyEval_SaveThread", "i64"))
            driver = atomics.pointer(f, self.word(_DRIVER))
            reached = f.call_pointer(driver, "i64", [self.word(_PROGRAM), self.word(_CALL)])
            with f.if_(lets):
                self.call("PyEval_RestoreThread", "void", state.get())
            good.set(f.cmp("sge", reached, 0))
            with f.loop(0, self.word(_FLAG_COUNT)) as k:
                flag = self.of(self.part(_FLAGS, k, 1), 0)
                good.set(f.and_(good.get(), f.cmp("eq", self.field(flag, 0, "i8"), 0)))
        with f.if_(good.get()):
            self.together(result, first.get())

    def output(self, wanted: Val) -> Val:
        f = self.f
        dtype, source = self.of(wanted, _DTYPE), self.of(wanted, _SOURCE)
        self.call("Py_IncRef", "void", dtype)  # which the next function takes
        rank = f.cast(self.of(wanted, _RANK), "i32")
        made = self.call("PyArray_Empty", "i64", rank, self.of(wanted, _SHAPE), dtype, f.const("i32", 0))
        with f.if_(f.cmp("ne", made, 0)), f.if_else(f.cmp("eq", source, 0)) as other:
            self.place(made, self.of(wanted, _PLACE))
            other()
            self.call("memcpy", "i64", self.field(made, objects.ARRAY_DATA), source, self.of(wanted, _BYTES))
        return made

    def together(self, result: Var, first: Val) -> None:
        """The outputs, held from ``first`` on, by their names."""
        f = self.f
        found = self.call("PyDict_New", "i64")
        failed = f.var("i32", 0)
        with f.if_else(f.cmp("eq", found, 0)) as other:
            failed.set(1)
            other()
            with f.loop(0, self.gives) as k:
                name = self.of(self.part(_GIVES, k, _TENSOR_WORDS), _NAME)
                output = f.load("i64", f.gep(self.held, first + k, "i64"))
                failed.set(f.or_(failed.get(), self.call("PyDict_SetItem", "i32", found, name, output)))
        with f.if_else(f.cmp("eq", failed.get(), 0)) as other:
            result.set(found)
            f.store(self.word(_RUNS) + 1, f.gep(self.words, 8 * _RUNS))
            other()
            self.call("PyErr_Clear", "void")
            with f.if_(f.cmp("ne", found, 0)):
                self.call("Py_DecRef", "void", found)
