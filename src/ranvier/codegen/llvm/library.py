"""Compiled kernels of this process: each distinct spec compiled once, freed when nobody holds it.

What one call asks for and nobody has yet comes from the disk cache or is compiled on all cores, and is loaded in one
piece of memory, which lives as long as any kernel in it. Two threads that want the same kernel at once make it once;
a thread waits only for kernels it asked for.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import cache, compiler, image, toolchain
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass


class Kernel:
    """A compiled function; its code lives as long as this object."""

    __slots__ = ("__weakref__", "_code", "address", "symbol")

    def __init__(self, symbol: str, address: int, code: compiler.Linked | image.Loaded) -> None:
        self.symbol = symbol
        self.address = address
        self._code = code


@dataclass
class Counts:
    """What this process did to get its kernels."""

    compiled: int = 0
    read: int = 0  # from the disk cache
    seconds: float = 0.0  # wall time of compiling, reading and loading, summed over calls


@dataclass(frozen=True)
class _Order:
    """A kernel that this call has to make."""

    spec: KernelSpec
    symbol: str
    made: Future[Kernel]


counts = Counts()
_lock = threading.Lock()
_kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()
_under_way: dict[str, Future[Kernel]] = {}


def _after_fork() -> None:
    """Whoever held the lock or was making a kernel does not exist in the child."""
    global _lock
    _lock = threading.Lock()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def symbol_of(spec: KernelSpec, isa: Isa) -> str:
    """The name of the function: a digest of everything the code depends on."""
    return "rv_" + hashlib.sha256(repr((isa.key, spec.key)).encode()).hexdigest()[:32]


def source(spec: KernelSpec, isa: Isa) -> str:
    """The LLVM IR of a spec."""
    module = Module(extremes=isa.extremes)
    spec.emit(module, symbol_of(spec, isa), isa)
    return ("" if _steps_pointers(spec) else toolchain.REDUCE.decode()) + str(module)


# Kernels of these were measured not to get slower without loop strength reduction; depthwise ones get 6 % faster. A
# micro-kernel of a product does get slower: its pointers no longer fit the registers.
_FAMILIES = ("attention", "conv.depthwise", "conv.winograd", "driver", "nests", "transpose")
_STEPPING = tuple(f"ranvier.codegen.llvm.{name}" for name in _FAMILIES)


def _steps_pointers(spec: KernelSpec) -> bool:
    """Are the addresses in the loops of this kernel written as cheaply as they can be?"""
    return getattr(spec.emit, "__module__", "").startswith(_STEPPING)


def kernels(specs: Iterable[KernelSpec], isa: Isa) -> dict[KernelSpec, Kernel]:
    """Compiled kernels for all specs; what another caller already holds is shared."""
    found: dict[KernelSpec, Kernel] = {}
    orders: list[_Order] = []
    awaited: dict[KernelSpec, Future[Kernel]] = {}
    wanted = {spec: symbol_of(spec, isa) for spec in dict.fromkeys(specs)}
    with _lock:
        for spec, symbol in wanted.items():
            kernel = _kernels.get(symbol)
            if kernel is not None:
                found[spec] = kernel
                continue
            if symbol not in _under_way:
                _under_way[symbol] = Future()
                orders.append(_Order(spec, symbol, _under_way[symbol]))
            awaited[spec] = _under_way[symbol]
    if orders:
        _fulfil(orders, isa)
    # own orders are done by now, so callers that wait for each other's cannot block one another
    found.update({spec: made.result() for spec, made in awaited.items()})
    return found


def _fulfil(orders: list[_Order], isa: Isa) -> None:
    """Make the kernels; whatever happens, nobody is left waiting."""
    started = time.perf_counter()
    try:
        codes = _codes(orders, isa)
        good = [order for order in orders if not isinstance(codes[order.symbol], BaseException)]
        loaded = _loaded({order.symbol: codes[order.symbol] for order in good})  # type: ignore[misc]
        for order in orders:
            code = codes[order.symbol]
            if isinstance(code, BaseException):
                order.made.set_exception(code)
            else:
                order.made.set_result(Kernel(order.symbol, loaded[order.symbol][order.symbol], loaded[order.symbol]))
    except BaseException as error:
        for order in orders:
            if not order.made.done():
                order.made.set_exception(error)
        raise
    finally:
        with _lock:
            for order in orders:
                _under_way.pop(order.symbol, None)
                if order.made.exception() is None:
                    _kernels[order.symbol] = order.made.result()
            counts.seconds += time.perf_counter() - started


def _loaded(codes: dict[str, bytes]) -> dict[str, compiler.Linked | image.Loaded]:
    """Code in memory, by symbol: images in one piece, objects in one link."""
    found: dict[str, compiler.Linked | image.Loaded] = {}
    images = {symbol: code for symbol, code in codes.items() if code.startswith(image.MAGIC)}
    objects = {symbol: code for symbol, code in codes.items() if symbol not in images}
    if images:
        found.update(dict.fromkeys(images, image.Loaded([image.Image.from_bytes(c) for c in images.values()])))
    if objects:
        found.update(dict.fromkeys(objects, compiler.link(list(objects.values()), list(objects))))
    return found


def _codes(orders: list[_Order], isa: Isa) -> dict[str, bytes | BaseException]:
    """Loadable code for each order, or the error that making it raised."""
    disk = cache.current()
    way = compiler.way()
    found: dict[str, bytes | BaseException] = {}
    keys: dict[str, str] = {}
    missing: list[_Order] = []
    for order in orders:
        sources = cache.sources_of(order.spec.emit) if disk is not None else None
        if disk is None or sources is None or not all(s.trusted() for s in sources):
            missing.append(order)
            continue
        keys[order.symbol] = key = cache.key_of(order.symbol, sources, way)
        code = disk.get(key)
        if code is None:
            missing.append(order)
        else:
            found[order.symbol] = code
    counts.read += len(found)
    counts.compiled += len(missing)

    def make(order: _Order) -> bytes | BaseException:
        try:
            code = _compiled(order.spec, isa)
        except Exception as error:
            return error
        if disk is not None and order.symbol in keys and compiler.way() == way:
            disk.put(keys[order.symbol], code)
        return code

    if missing:
        compiler.prepare(len(missing))
    threads = min(len(missing), compiler.side_by_side())
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="ranvier-compile") as pool:
            made = list(pool.map(make, missing))
    else:
        made = [make(order) for order in missing]
    found.update({order.symbol: code for order, code in zip(missing, made)})
    return found


def _compiled(spec: KernelSpec, isa: Isa) -> bytes:
    """Code as it is loaded and kept: an image where this platform loads those, else an object for the linker."""
    code = compiler.compile_object(source(spec, isa), isa)
    made = image.from_object(code) if image.supported() else None
    return code if made is None else made.to_bytes()
