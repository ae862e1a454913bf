"""Loading, launching and forgetting kernels of the user's own."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import isa as isas
from ranvier.codegen.llvm import library, nests
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.program import NativeProgram, Placement
from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.storage import Storage, View, aligned_empty
from ranvier.devices import usable_cores
from ranvier.errors import InvalidConfig, InvalidInput, KernelError
from ranvier.providers.base import KernelHandle, KernelInfo
from ranvier.providers.cpu.custom.builder import LoopBuilder, TensorTerm, check_nest
from ranvier.providers.cpu.custom.signature import (
    Arguments,
    Buffer,
    Local,
    Scalar,
    Signature,
    Size,
    Tensor,
    bind,
    extents,
)
from ranvier.providers.cpu.custom.terms import Term
from ranvier.providers.cpu.custom.text_kernel import text_spec

Array = np.ndarray[Any, Any]
_KEPT = 16  # programs of a kernel: one for each layout of arguments, grid and block
_FIRST = 2  # base of the first argument in a native run


class _Program:
    """A kernel made ready for arguments of one layout."""

    def __init__(self, launches: Sequence[Launch], storages: Sequence[Storage], isa: Isa) -> None:
        places = {storage: Placement(_FIRST + k, 0) for k, storage in enumerate(storages)}
        self.arena = 0
        for launch in launches:
            for buffer in launch.buffers:
                if isinstance(buffer, At) and buffer.storage.kind == "temp" and buffer.storage not in places:
                    places[buffer.storage] = Placement(1, self.arena)
                    self.arena += -(-buffer.storage.nbytes // 64) * 64
        self._native = NativeProgram(launches, places, isa, bases=_FIRST + len(storages)) if launches else None

    def run(self, arrays: list[Array], threads: int) -> None:
        if self._native is None:
            return
        memory = aligned_empty((self.arena,), np.dtype(np.uint8)) if self.arena else None
        self._native.run(arrays, [], 0 if memory is None else memory.ctypes.data, threads=threads)


class _Loaded:
    """One kernel: what it was made of, and the programs it has become."""

    kind: str
    strided: bool  # may its tensors lie otherwise than row-major?

    def __init__(self, name: str, signature: Signature, isa: Isa) -> None:
        self.name = name
        self.signature = signature
        self.isa = isa
        self._lock = threading.Lock()
        self._programs: OrderedDict[Any, _Program] = OrderedDict()
        self._launches, self._seconds = 0, 0.0

    def launch(self, grid: Any, block: Any, args: Sequence[Any], threads: int) -> None:
        found = bind(self.name, self.signature, args, strided=self.strided)
        shape = self.shape(grid, block)
        key = (shape, found.layout)
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self.program(shape, found)
                while len(self._programs) > _KEPT:
                    self._programs.popitem(last=False)
            else:
                self._programs.move_to_end(key)
        started = time.perf_counter()
        program.run(found.arrays, threads)
        seconds = time.perf_counter() - started
        with self._lock:
            self._launches += 1
            self._seconds += seconds

    def shape(self, grid: Any, block: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError

    def program(self, shape: tuple[tuple[int, ...], tuple[int, ...]], args: Arguments) -> _Program:
        raise NotImplementedError

    def source(self) -> str:
        raise NotImplementedError

    def info(self) -> KernelInfo:
        source = self.source()
        with self._lock:
            return KernelInfo(self.name, self.kind, str(self.signature), source, self._launches, self._seconds)


class _TextKernel(_Loaded):
    kind, strided = "llvm", False

    def __init__(self, text: str, name: str, signature: Signature, isa: Isa) -> None:
        super().__init__(name, signature, isa)
        self._spec: KernelSpec = text_spec(text, name, signature, isa)
        self._code = library.kernels([self._spec], isa)[self._spec]  # compiled now: errors belong to loading

    def shape(self, grid: Any, block: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        axes = self.signature.axes
        return extents(self.name, "grid", grid, axes), extents(self.name, "block", block, axes)

    def program(self, shape: tuple[tuple[int, ...], tuple[int, ...]], args: Arguments) -> _Program:
        grid, block = shape
        storages = [Storage("input", a.nbytes, index=k) for k, a in enumerate(args.arrays)]
        numbers: list[int] = []
        at, locals_left = 0, list(args.locals)
        for param in self.signature.params:
            if isinstance(param, Size):
                numbers.append(args.sizes[param.name])
            elif isinstance(param, Local):
                numbers.append(at)
                at += locals_left.pop(0)
        arrays = [p for p in self.signature.given if isinstance(p, Tensor | Buffer)]
        tiles = math.prod(grid)
        launch = Launch(
            self._spec,
            tuple(At(s) for s in storages),
            (*grid, *block, *numbers),
            tiles,
            tuple(s for s, p in zip(storages, arrays) if p.access != "in"),
            scratch=at,
            flops=self.signature.work * tiles,
            traffic=float(sum(a.nbytes for a in args.arrays)),
            label=self.name,
        )
        return _Program([launch] if tiles else [], storages, self.isa)

    def source(self) -> str:
        return library.source(self._spec, self.isa)


class _LoopKernel(_Loaded):
    kind, strided = "loops", True

    def __init__(self, function: Callable[..., Nest], name: str, signature: Signature, isa: Isa) -> None:
        super().__init__(name, signature, isa)
        for param in signature.params:
            if isinstance(param, Buffer | Local):
                raise InvalidConfig(f"kernel {name!r}: {param.name!r}: loops work on tensors, scalars and sizes")
        if not any(isinstance(p, Tensor) and p.access != "in" for p in signature.params):
            raise InvalidConfig(f"kernel {name!r}: no tensor is written to")
        if signature.axes != 1 or signature.work:
            raise InvalidConfig(f"kernel {name!r}: loops are scheduled by themselves; axes and work are not theirs")
        try:
            inspect.signature(function).bind(*[None] * (1 + len(signature.params)))
        except TypeError as error:
            wanted = ", ".join(["loops", *(p.name for p in signature.params)])
            raise InvalidConfig(f"kernel {name!r}: the function must take ({wanted}): {error}") from None
        self._function = function
        self._newest = "no loops yet: they are written for the sizes of the first launch"

    def shape(self, grid: Any, block: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if grid is not None or block is not None:
            raise InvalidInput(f"kernel {self.name!r}: loops are cut into tiles by themselves: grid and block are None")
        return (), ()

    def program(self, shape: tuple[tuple[int, ...], tuple[int, ...]], args: Arguments) -> _Program:
        storages = [Storage("input", a.nbytes, index=k) for k, a in enumerate(args.arrays)]
        nest = self._written(args, storages)
        launches = nests.launches(nest, self.isa)
        self._newest = "\n".join(f"; {x.spec.name}\n{library.source(x.spec, self.isa)}" for x in launches)
        return _Program(launches, storages, self.isa)

    def _written(self, args: Arguments, storages: Sequence[Storage]) -> Nest:
        """What the function makes of arguments of these shapes."""
        tensors = [p for p in self.signature.params if isinstance(p, Tensor)]
        views: dict[str, View] = {}
        for param, storage, array in zip(tensors, storages, args.arrays):
            steps = tuple(s // array.itemsize for s in array.strides)
            views[param.name] = View(storage, param.dtype, array.shape, steps)
        domain = next(views[p.name].shape for p in tensors if p.access != "in")
        loops = LoopBuilder(self.name, domain)
        given: list[Any] = []
        named: list[TensorTerm] = []
        scalars: list[View] = []
        for p in self.signature.params:
            if isinstance(p, Tensor):
                named.append(TensorTerm(loops, p.name, views[p.name], p.access))
                given.append(named[-1])
            elif isinstance(p, Scalar):
                offset = 8 * len(scalars) // p.dtype.numpy.itemsize
                scalars.append(View(storages[-1], p.dtype, (), (), offset))
                given.append(_ScalarTerm(loops, scalars[-1]))
            else:
                assert isinstance(p, Size)
                given.append(args.sizes[p.name])
        nest = self._function(loops, *given)
        check_nest(self.name, nest, named, scalars)
        return nest

    def source(self) -> str:
        return self._newest


class _ScalarTerm(Term):
    """A scalar argument: read where it is used, so that one program serves all its values."""

    __slots__ = ("_loops", "_view")

    def __init__(self, loops: LoopBuilder, view: View) -> None:
        self._loops = loops
        self._view = view

    @property
    def expr(self) -> Any:
        return self._loops.load_scalar(self._view)


class CpuKernels:
    """The kernels that were loaded on the CPU. Thread-safe."""

    def __init__(self, *, isa: Isa | None = None, threads: int | None = None) -> None:
        self._isa = isa
        self._threads = threads or min(usable_cores(), 64)
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}
        self._numbers = itertools.count(1)

    def load(self, source: str | Callable[..., Nest], name: str, signature: Signature) -> KernelHandle:
        """A kernel from LLVM IR text, of which ``name`` is the function, or from a function that writes loops."""
        if not isinstance(name, str) or not name:
            raise InvalidConfig(f"a kernel needs a name, got {name!r}")
        if not isinstance(signature, Signature):
            raise InvalidConfig(f"kernel {name!r}: signature must be a Signature, got {type(signature).__name__}")
        isa = self._isa or isas.host()
        made: _Loaded
        if isinstance(source, str):
            made = _TextKernel(source, name, signature, isa)
        elif callable(source):
            made = _LoopKernel(source, name, signature, isa)
        else:
            raise InvalidConfig(
                f"kernel {name!r}: source must be LLVM IR text or a function, got {type(source).__name__}"
            )
        with self._lock:
            number = next(self._numbers)
            self._loaded[number] = made
        return KernelHandle("cpu", name, number)

    def launch(self, handle: KernelHandle, grid: Any = None, block: Any = None, args: Sequence[Any] = ()) -> None:
        self._find(handle).launch(grid, block, args, self._threads)

    def info(self, handle: KernelHandle) -> KernelInfo:
        return self._find(handle).info()

    def unload(self, handle: KernelHandle) -> None:
        self._find(handle)
        with self._lock:
            self._loaded.pop(handle.number, None)

    def handles(self) -> list[KernelHandle]:
        with self._lock:
            return [KernelHandle("cpu", kernel.name, number) for number, kernel in self._loaded.items()]

    def close(self) -> None:
        with self._lock:
            self._loaded.clear()

    def _find(self, handle: Any) -> _Loaded:
        if not isinstance(handle, KernelHandle):
            raise InvalidInput(f"a kernel is named by what load() returned, got {type(handle).__name__}")
        with self._lock:
            found = self._loaded.get(handle.number) if handle.provider == "cpu" else None
        if found is None or found.name != handle.name:
            where = "unloaded, or never loaded here" if handle.provider == "cpu" else f"of provider {handle.provider!r}"
            raise KernelError(f"kernel {handle.name!r} is {where}", provider="cpu")
        return found
