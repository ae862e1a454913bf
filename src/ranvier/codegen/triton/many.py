"""Launches of one kernel on many tensors, as one: what an optimizer does to each parameter, the sums of all biases.

Each of them alone is over before the next can begin, and most of the time goes by between them. The addresses of all
are arguments of the kernel, so nothing has to be copied before it and a launch can be captured. Programs are numbered
through; each finds its tensor by its number. Elementwise kernels may be of different sizes; others must have all their
numbers in common.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ranvier.codegen.triton.printer import Pointer, Source

_MOST_BYTES = 3600  # of arguments; a launch takes 4096
_VECTOR = 16  # elements; what Triton tells multiples of from other numbers
_MOST = 32  # tensors: each costs every program some selections
_FORM = re.compile(
    r"^(?P<before>.*?)@triton\.jit\ndef (?P<name>flat_\w+)\((?P<pointers>(?:p\d+, )+)n_x, X: tl\.constexpr\):\n"
    r"    x = tl\.program_id\(0\) \* X \+ tl\.arange\(0, X\)\n(?P<body>.*)$",
    re.DOTALL,
)
_ANY = re.compile(
    r"^(?P<before>.*?)@triton\.jit\ndef (?P<name>\w+)\((?P<pointers>(?:p\d+, )+)(?P<rest>[^)]*)\):\n(?P<body>.*)$",
    re.DOTALL,
)
_PROGRAM = "tl.program_id(0)"
_SEVERAL = "many_"


def likeness(source: Source) -> object | None:
    """What two launches have in common that can be one; None for kernels of other forms. Sizes that are multiples of
    16 are among themselves: others would keep them from being read in whole vectors."""
    kinds = tuple(p.dtype for p in source.pointers)
    if is_flat(source):
        return source.text, kinds, source.numbers[0] % _VECTOR == 0
    if _ANY.match(source.text) is None or source.grid[1:] != (1, 1) or source.name.startswith(_SEVERAL):
        return None
    return source.text, kinds, source.numbers, source.constants, source.grid, source.warps, source.stages


def is_flat(source: Source) -> bool:
    """Whether it is elementwise work of one size, which need not be that of the others."""
    return len(source.numbers) == 1 and _FORM.match(source.text) is not None


def room(sources: Sequence[Source]) -> bool:
    """Whether so many launches fit into one."""
    own = len(_own(sources))
    shared = len(sources[0].pointers) - own
    return len(sources) <= _MOST and 8 * (own * len(sources) + shared) + 8 * len(sources) <= _MOST_BYTES


def merged(sources: Sequence[Source]) -> Source:
    """One launch for several of the same :func:`likeness`, none of which reads what another writes."""
    return _of_sizes(sources) if is_flat(sources[0]) else _of_one_size(sources)


def _of_one_size(sources: Sequence[Source]) -> Source:
    first = sources[0]
    form = _ANY.match(first.text)
    assert form is not None and room(sources)
    own = _own(sources)
    shared = [j for j in range(len(first.pointers)) if j not in own]
    names = [f"p{j}" for j in shared] + [f"p{j}_{k}" for k in range(len(sources)) for j in own]
    pointers = [first.pointers[j] for j in shared] + [source.pointers[j] for source in sources for j in own]
    lines = [f"    launched = {_PROGRAM}", "    which = launched // each"]
    lines += [f"    p{j} = p{j}_0" for j in own]
    for k in range(1, len(sources)):
        lines += [f"    p{j} = tl.where(which == {k}, p{j}_{k}, p{j})" for j in own]
    name = f"{_SEVERAL}{form['name']}"
    rest = ", ".join(["each", *([form["rest"]] if form["rest"] else [])])
    head = f"{form['before']}@triton.jit\ndef {name}({', '.join(names)}, {rest}):\n"
    text = head + "\n".join(lines) + "\n" + form["body"].replace(_PROGRAM, "(launched % each)")
    numbers = (first.grid[0], *first.numbers)
    grid = (first.grid[0] * len(sources), 1, 1)
    return Source(text, name, tuple(pointers), numbers, first.constants, grid, first.warps, first.stages)


def _of_sizes(sources: Sequence[Source]) -> Source:
    form = _FORM.match(sources[0].text)
    assert form is not None and room(sources)
    block = max(dict(source.constants)["X"] for source in sources)
    own = _own(sources)
    pointers: list[Pointer] = []
    names: list[str] = []
    lines = ["    program = tl.program_id(0)"]
    for j, pointer in enumerate(sources[0].pointers):
        if j not in own:
            names.append(f"p{j}")
            pointers.append(pointer)
    for k, source in enumerate(sources):
        for j in own:
            names.append(f"p{j}_{k}")
            pointers.append(source.pointers[j])
    numbers: list[int] = []
    first = 0
    for k, source in enumerate(sources):
        names += [f"n_{k}", f"s_{k}"]
        numbers += [source.numbers[0], first]
        first += -(-source.numbers[0] // block)
    lines += [f"    p{j} = p{j}_0" for j in own]
    lines += ["    n_x = n_0", "    start = s_0"]
    for k in range(1, len(sources)):
        lines.append(f"    here = program >= s_{k}")
        lines += [f"    p{j} = tl.where(here, p{j}_{k}, p{j})" for j in own]
        lines += [f"    n_x = tl.where(here, n_{k}, n_x)", f"    start = tl.where(here, s_{k}, start)"]
    lines.append("    x = (program - start) * X + tl.arange(0, X)")
    name = f"{_SEVERAL}{form['name']}"
    head = f"{form['before']}@triton.jit\ndef {name}({', '.join(names)}, X: tl.constexpr):\n"
    text = head + "\n".join(lines) + "\n" + form["body"]
    warps, stages = (max(getattr(source, what) for source in sources) for what in ("warps", "stages"))
    return Source(text, name, tuple(pointers), tuple(numbers), (("X", block),), (first, 1, 1), warps, stages)


def _own(sources: Sequence[Source]) -> list[int]:
    """The pointers that are not the same in all of them."""
    places = [[(p.storage, p.offset) for p in source.pointers] for source in sources]
    return [j for j in range(len(places[0])) if any(each[j] != places[0][j] for each in places)]
