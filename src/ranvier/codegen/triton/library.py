"""Nests as kernels that can be launched.

::

    printed = kernel(nest)              # printed and scheduled; nothing is compiled yet, torch is not needed
    printed.source                      # Triton text of all its kernels, for people
    printed.temporaries                 # storages besides the nest's own that must have memory too (often none)
    printed.launch(memory)              # on torch's current stream and device
    run = printed.bound(memory)         # the same with addresses looked up once: a callable without arguments

``memory`` maps every :class:`Storage` the nest names, and every temporary, to a torch tensor whose first byte is the
storage's first byte, of any dtype and shape (a view into an arena will do). A nest with nothing to do has no calls, and
launching it does nothing. One nest may become several calls (few huge rows are folded in parts): ``printed.calls``
are run in order on one stream. Memory may overlap only as it may for the CPU's kernels: elementwise in place.

Kernels are specialised by structure; sizes and strides are passed when they are launched. Triton makes further
variants by the alignment of addresses and by which numbers are multiples of 16. A compiled variant is found again by
those, so a second launch costs a few microseconds of Python. Where and when it compiles: :mod:`.images`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.loops.normalize import normalized
from ranvier.codegen.loops.split import Cut, split
from ranvier.codegen.phases import phase
from ranvier.codegen.storage import Storage
from ranvier.codegen.triton import images
from ranvier.codegen.triton.modules import function
from ranvier.codegen.triton.printer import Pointer, Source, printed
from ranvier.codegen.triton.schedule import PROCESSORS, Plan, along, plan, power_of_two
from ranvier.records import dataclass

Memory = Mapping[Storage, Any]  # torch tensors
Launcher = Callable[[list[int]], None]  # is given the addresses
_FEW = PROCESSORS // 2  # programs; with fewer, most of the GPU would idle
_ALIGNED = 16  # elements; parts of such lengths are read in whole vectors
_ENOUGH = PROCESSORS * 16  # programs that rows are cut into parts for
_COLUMNS = 1 << 15  # points from which on columns are cut …
_HIGH = 512  # … that are so high …
_TILE = 32  # … into parts of this height


def kernel(nest: Nest) -> Printed:
    """The kernels that carry out a nest, with the tuning that is known for them."""
    from ranvier.codegen.triton import tune

    normal = normalized(nest)
    if normal is None:
        return Printed(())
    first = plan(normal)
    parts = [normal]
    programs = first.programs(normal)
    if normal.row and programs < (_FEW if along(normal) else PROCESSORS):
        parts = split(normal, _cut(normal, programs))
    if parts[0] is normal:
        return Printed((Call(printed(normal, tune.known(normal, first))),))
    calls = []
    for part in parts:
        made = normalized(part)
        if made is not None:
            calls.append(Call(printed(made, tune.known(made, plan(made)))))
    own = {o.view.storage for o in normal.operands}
    return Printed(tuple(calls), tuple(dict.fromkeys(s for c in calls for s in c.storages if s not in own)))


def _cut(nest: Nest, programs: int) -> Cut:
    """Columns are cut into parts of which each is one tile."""
    if along(nest):
        return Cut(parts=power_of_two(-(-_ENOUGH // programs)), align=_ALIGNED)
    lanes = math.prod(nest.extents[a] for a in nest.outer)
    return Cut(points=_COLUMNS, row=_HIGH, part=lanes * _TILE, align=_TILE)


def planned(nest: Nest, how: Plan) -> Printed:
    """As :func:`kernel` for a nest in normal form, cut in a given way."""
    return Printed((Call(printed(nest, how)),))


@dataclass
class Call:
    """One kernel with the arguments of one launch, all but the addresses."""

    source: Source
    _variants: dict[tuple[bool, ...], Launcher] = field(default_factory=dict)

    @property
    def storages(self) -> tuple[Storage, ...]:
        return tuple(dict.fromkeys(p.storage for p in self.source.pointers))

    @property
    def written(self) -> tuple[Storage, ...]:
        return tuple(dict.fromkeys(p.storage for p in self.source.pointers if p.written))

    def launch(self, memory: Memory) -> None:
        addresses = [memory[p.storage].data_ptr() + p.offset for p in self.source.pointers]
        launcher = self._variants.get(_alignment(addresses))
        if launcher is None:
            self._first(memory, addresses)
        else:
            launcher(addresses)

    def bound(self, memory: Memory) -> Callable[[], None]:
        """A launch with the addresses of now; ``memory`` must stay where it is."""
        addresses = [memory[p.storage].data_ptr() + p.offset for p in self.source.pointers]
        key = _alignment(addresses)

        def launch() -> None:
            launcher = self._variants.get(key)
            if launcher is None:
                self._first(memory, addresses)
            else:
                launcher(addresses)

        return launch

    def compile(self) -> None:
        """Have the kernel compiled for aligned addresses, in any thread; launches then find it."""
        import torch

        source = self.source
        if images.elsewhere() and images.image(self._order([True] * len(source.pointers))) is not None:
            return
        function(source.text, source.name).warmup(
            *(getattr(torch, p.dtype) for p in source.pointers),
            *source.numbers,
            grid=source.grid,
            **dict(source.constants),
            num_warps=source.warps,
            num_stages=source.stages,
        )

    def is_compiled(self) -> bool:
        """Whether :meth:`compile` needs no compiler."""
        return images.is_kept(self._order([True] * len(self.source.pointers)))

    def _order(self, aligned: Iterable[bool]) -> images.Order:
        """What has to be compiled for the current device."""
        import torch

        major, minor = torch.cuda.get_device_capability()
        return images.order(self.source, aligned, major * 10 + minor)

    def _first(self, memory: Memory, addresses: list[int]) -> None:
        """Launch for the first time with addresses so aligned, and keep what the driver needs."""
        key = _alignment(addresses)
        on_gpu = any(memory[p.storage].is_cuda for p in self.source.pointers)
        with phase("compile"):
            launcher = self._by_driver(key) if on_gpu else None
            if launcher is None:
                launcher = self._by_triton(memory)
            else:
                launcher(addresses)
        if launcher is not None:
            self._variants[key] = launcher

    def _by_driver(self, aligned: tuple[bool, ...]) -> Launcher | None:
        """What launches machine code from elsewhere; None where there is none."""
        if not images.elsewhere():
            return None
        import torch

        from ranvier.codegen.triton.launching import launcher

        order = self._order(aligned)
        image = images.image(order)
        if image is None:
            return None
        device, raw = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream
        return launcher(image, order, self.source.numbers, self.source.grid, device, lambda: raw(device))

    def _by_triton(self, memory: Memory) -> Launcher | None:
        """Launch through Triton, which compiles the kernel where it has to; what launches it again."""
        source = self.source
        compiled = function(source.text, source.name)[source.grid](
            *(_typed(memory[p.storage], p) for p in source.pointers),
            *source.numbers,
            **dict(source.constants),
            num_warps=source.warps,
            num_stages=source.stages,
        )
        # interpreted kernels have nothing to keep
        return None if compiled is None else _launcher(compiled, source)


@dataclass(frozen=True)
class Printed:
    """What a nest became: calls to run in order on one stream."""

    calls: tuple[Call, ...]
    temporaries: tuple[Storage, ...] = ()

    @property
    def source(self) -> str:
        return "\n\n".join(c.source.text for c in self.calls)

    def launch(self, memory: Memory) -> None:
        for call in self.calls:
            call.launch(memory)

    def bound(self, memory: Memory) -> Callable[[], None]:
        launches = [call.bound(memory) for call in self.calls]
        if len(launches) == 1:
            return launches[0]

        def launch() -> None:
            for each in launches:
                each()

        return launch


def _alignment(addresses: list[int]) -> tuple[bool, ...]:
    """What Triton compiles apart: addresses that are multiples of 16, and others."""
    return tuple([a & 15 == 0 for a in addresses])


def _typed(tensor: Any, pointer: Pointer) -> Any:
    """A tensor of the pointer's type that begins where it points to."""
    import torch

    dtype = getattr(torch, pointer.dtype)
    start = tensor.storage_offset() * tensor.element_size() + pointer.offset
    size = max(0, (tensor.untyped_storage().nbytes() - start) // dtype.itemsize)
    made = torch.empty(0, dtype=dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), start // dtype.itemsize, (size,), (1,))


def _launcher(compiled: Any, source: Source) -> Launcher:
    """A compiled kernel's own entry, without what Triton does at every launch to find it."""
    import torch

    run, entry, packed = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = source.grid
    rest = (*source.numbers, *(size for _, size in source.constants))
    stream, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device

    def launch(addresses: list[int]) -> None:
        run(x, y, z, stream(device()), entry, packed, None, None, None, *addresses, *rest)

    return launch
