"""Python's own objects as generated code sees them: where things are in lists and arrays, and functions to make some.

Nothing here is taken on trust: layouts are held against objects that Python shows, and where one differs generated
code is given addresses by Python instead.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from ranvier.codegen.llvm import system

TYPE = 8  # offset of an object's type
LIST_SIZE = 16  # offset of a list's length
LIST_ITEMS = 24  # offset of the pointer to a list's items
ARRAY_DATA = 16  # offset of the pointer to an array's elements
ARRAY_RANK = 24  # offset of the number of an array's dimensions, 32 bits
ARRAY_SHAPE = 32  # offset of the pointer to an array's sizes
ARRAY_DTYPE = 56  # offset of the pointer to an array's element type
ARRAY_FLAGS = 64  # offset of an array's flags, 32 bits
PLAIN = 0x101  # of these: C-contiguous and aligned

# The words of ``interpreter()``: objects, then functions of the interpreter, of the system and of NumPy.
OBJECTS = ("none", "true", "dict", "array")
FUNCTIONS = (
    "Py_IncRef", "Py_DecRef", "PyDict_Size", "PyDict_GetItem", "PyDict_New", "PyDict_SetItem", "PyObject_CallNoArgs",
    "PyErr_Clear", "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
WORDS = {name: k for k, name in enumerate((*OBJECTS, *FUNCTIONS, "memcpy", "PyArray_Empty"))}
_PLACE_OF_EMPTY = 184  # in NumPy's table of functions, where places are for ever


@functools.cache
def readable() -> bool:
    """Whether generated code may read lists and arrays by the offsets above.

    The pointer of a list is followed only after everything else about its layout proved right, so that a Python with
    other objects is noticed and not crashed.
    """
    plain = (
        sys.implementation.name == "cpython"
        and not hasattr(sys, "getobjects")
        and (object.__basicsize__, list.__basicsize__) == (16, 40)
        and np.ndarray.__basicsize__ >= ARRAY_FLAGS + 8
    )
    if not plain:
        return False
    arrays: list[np.ndarray[Any, Any]] = [np.empty(shape, np.float32) for shape in ((), (1,), (3, 5), (7, 0), (9000,))]
    arrays += [arrays[2][1:, ::2], arrays[2].T, np.empty(9, np.uint8)[1:].view(np.float64)]
    if any(_word(id(a) + ARRAY_DATA) != a.ctypes.data for a in arrays):
        return False
    if any(_word(id(a) + TYPE) != id(np.ndarray) for a in arrays):
        return False
    if any((_word(id(a) + ARRAY_FLAGS) & PLAIN == PLAIN) != (a.flags.c_contiguous and a.flags.aligned) for a in arrays):
        return False
    empty: list[Any] = []
    lists = [arrays * n for n in (1, 2, 50)]
    if _word(id(empty) + LIST_SIZE) != 0 or _word(id(empty) + LIST_ITEMS) != 0:
        return False
    for each in lists:
        if _word(id(each) + TYPE) != id(list):
            return False
        items = _word(id(each) + LIST_ITEMS)
        room = _word(id(each) + 32)
        if _word(id(each) + LIST_SIZE) != len(each) or not len(each) <= room < 2 * len(each) + 16:
            return False
        if not items or items % 8 or any(_word(items + 8 * k) != id(a) for k, a in enumerate(each)):
            return False
    return True


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


@functools.cache
def interpreter() -> np.ndarray[Any, Any] | None:
    """Addresses by ``WORDS``; None where generated code may not make objects."""
    if not readable() or not _arrays_readable():
        return None
    try:
        functions = [_address(getattr(ctypes.pythonapi, name)) for name in FUNCTIONS]
    except AttributeError:
        return None
    known: list[Any] = [None, True, dict, np.ndarray]
    found = np.array([*map(id, known), *functions, system.copy_function(), _empty()], np.int64)
    return found if found.all() and _makes_arrays(int(found[-1])) else None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _arrays_readable() -> bool:
    arrays: list[np.ndarray[Any, Any]] = [np.empty(n, d) for n, d in (((), "f4"), ((3, 5), "i8"), ((2, 0, 7), "u1"))]
    arrays.append(arrays[1].T)
    for each in arrays:
        sizes = _word(id(each) + ARRAY_SHAPE)
        if _word(id(each) + ARRAY_RANK) & 0xFFFFFFFF != each.ndim or _word(id(each) + ARRAY_DTYPE) != id(each.dtype):
            return False
        if each.ndim and (not sizes or sizes % 8):
            return False
        if any(_word(sizes + 8 * k) != size for k, size in enumerate(each.shape)):
            return False
    return True


def _empty() -> int:
    """``PyArray_Empty``, out of the table that NumPy keeps for modules in C."""
    core = getattr(np, "_core", None) or np.core
    kinds = (ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer = ctypes.PYFUNCTYPE(*kinds)(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        table = pointer(getattr(core.multiarray, "_ARRAY_API", None), None)
    except ValueError:
        return 0
    return _word(table + 8 * _PLACE_OF_EMPTY) if table else 0


def _makes_arrays(empty: int) -> bool:
    """Whether the function does what its name says."""
    sizes, dtype = (ctypes.c_ssize_t * 2)(3, 5), np.dtype(np.float64)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # which the next function takes
    kinds = (ctypes.py_object, ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int)
    made = ctypes.PYFUNCTYPE(*kinds)(empty)(2, ctypes.addressof(sizes), dtype, 0)
    return type(made) is np.ndarray and (made.shape, made.dtype) == ((3, 5), dtype) and made.flags.c_contiguous
