"""Element types in memory and in registers, and how values get from one to the other.

Types narrower than float32 have no arithmetic of their own on most machines: half and bfloat are 16-bit patterns in
memory and float in registers. A bool is a byte in memory and an ``i1`` in registers.
"""

from __future__ import annotations

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val, size_of, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.errors import NotSupported

_REGISTERS: dict[DType, str] = {
    DType.float32: "float",
    DType.float64: "double",
    DType.float16: "float",
    DType.bfloat16: "float",
    DType.bool: "i1",
    **{d: f"i{d.bits}" for d in (DType.int8, DType.int16, DType.int32, DType.int64)},
    **{d: f"i{d.bits}" for d in (DType.uint8, DType.uint16, DType.uint32, DType.uint64)},
}
NARROW = frozenset({DType.float16, DType.bfloat16})  # computed in float, rounded after every operation
DTYPES = frozenset(_REGISTERS)  # what generated code can compute with


def register_type(dtype: DType) -> str:
    """The LLVM element type that values of a dtype have in registers."""
    found = _REGISTERS.get(dtype)
    if found is None:
        raise NotSupported(f"generated code has no {dtype} arithmetic")
    return found


def memory_type(dtype: DType) -> str:
    """The LLVM element type of a dtype in memory."""
    if dtype in NARROW:
        return "i16"
    return "i8" if dtype is DType.bool else register_type(dtype)


def is_signed(dtype: DType) -> bool:
    """Whether integer instructions on this dtype are the signed ones."""
    return dtype.name.startswith("int")


def from_memory(f: Fn, isa: Isa, dtype: DType, raw: Val) -> Val:
    """The register form of what was loaded."""
    if dtype is DType.bool:
        return f.cmp("ne", raw, 0)
    if dtype is DType.float16:
        return vmath.half_to_float(f, raw, isa)
    if dtype is DType.bfloat16:
        return vmath.bfloat_to_float(f, raw, isa)
    return raw


def to_memory(f: Fn, isa: Isa, dtype: DType, value: Val) -> Val:
    """What has to be stored for a value in registers."""
    if dtype is DType.bool:
        return f.cast(value, "i8")
    if dtype is DType.float16:
        return vmath.float_to_half(f, value, isa)
    if dtype is DType.bfloat16:
        return vmath.float_to_bfloat(f, value, isa)
    return value


def rounded(f: Fn, isa: Isa, dtype: DType, value: Val) -> Val:
    """A float rounded to what the narrow type can hold; other types as they are."""
    return from_memory(f, isa, dtype, to_memory(f, isa, dtype, value)) if dtype in NARROW else value


def widened(f: Fn, value: Val, lanes: int) -> Val:
    """A scalar in every lane; a vector as it is."""
    return value if value.lanes == lanes else f.splat(value, lanes)


def load_vector(
    f: Fn,
    isa: Isa,
    dtype: DType,
    address: Val,
    lanes: int,
    *,
    mask: Val | None = None,
    other: int | float = 0,
    align: int | None = None,
) -> Val:
    """``lanes`` contiguous elements in register form; where a mask is off, ``other``, and memory is not touched."""
    element = memory_type(dtype)
    kind = vector(element, lanes)
    if mask is None:
        return from_memory(f, isa, dtype, f.load(kind, address, align))
    if lanes == 1:
        value = f.var(register_type(dtype), f.const(register_type(dtype), other))
        with f.if_(mask):
            value.set(from_memory(f, isa, dtype, f.load(kind, address, align)))
        return value.get()
    if dtype in NARROW:
        value_there = from_memory(f, isa, dtype, f.masked_load(kind, address, mask, None, align))
        return value_there if other == 0 else f.select(mask, value_there, f.const(value_there.type, other))
    filler = f.const(kind, other) if other else None
    return from_memory(f, isa, dtype, f.masked_load(kind, address, mask, filler, align))


def store_vector(
    f: Fn, isa: Isa, dtype: DType, value: Val, address: Val, *, mask: Val | None = None, align: int | None = None
) -> None:
    """Contiguous elements from registers to memory, those where the mask is on."""
    raw = to_memory(f, isa, dtype, value)
    if mask is None:
        f.store(raw, address, align)
    elif raw.lanes == 1:
        with f.if_(mask):
            f.store(raw, address, align)
    else:
        f.masked_store(raw, address, mask, align)


def store_product(f: Fn, isa: Isa, dtype: DType, value: Val, address: Val, mask: Val | None = None) -> None:
    """As :func:`store_vector`, for what became of a product: denormals of bfloat16 may become zeros, as they do in
    products of it."""
    lanes = value.lanes
    takes = lanes == 16 or (mask is None and (1 < lanes < 16 or lanes == 32))
    if dtype is not DType.bfloat16 or not isa.has("avx512bf16") or not takes:
        store_vector(f, isa, dtype, value, address, mask=mask)
    elif mask is not None:
        f.masked_store(narrowed(f, value), address, mask, 2)
    elif lanes == 32:
        low, high = (f.shuffle(value, None, range(k, k + 16)) for k in (0, 16))
        f.store(narrowed_pair(f, low, high), address, 2)
    elif lanes == 16:
        f.store(narrowed(f, value), address, 2)
    else:  # the instruction takes 16 floats: the others are whatever lies in the register
        whole = narrowed(f, f.shuffle(value, None, [min(k, lanes) for k in range(16)]))
        f.store(f.shuffle(whole, None, range(lanes)), address, 2)


def narrowed(f: Fn, value: Val) -> Val:
    """16 floats as bfloat16 (the bits of them), by the instruction: a sixth of the work, and denormals become zeros."""
    found = f.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", vector("bfloat", 16), [value])
    return f.bitcast(found, vector("i16", 16))


def narrowed_pair(f: Fn, low: Val, high: Val) -> Val:
    """Two vectors of 16 floats as 32 bfloat16, likewise."""
    pairs = f.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector("bfloat", 32), [high, low])
    return f.bitcast(pairs, vector("i16", 32))


def gather_elements(
    f: Fn,
    isa: Isa,
    dtype: DType,
    base: Val,
    positions: Val,
    *,
    mask: Val | None = None,
    other: int | float = 0,
) -> Val:
    """One element per lane from ``base[positions]`` in register form."""
    element = memory_type(dtype)
    if positions.lanes == 1:
        address = f.gep(base, positions, element)
        return load_vector(f, isa, dtype, address, 1, mask=mask, other=other)
    if size_of(element) >= 4:
        filler = f.const(vector(element, positions.lanes), other) if mask is not None and other else None
        return from_memory(f, isa, dtype, f.gather(element, base, positions, mask, filler))
    # no instruction gathers bytes or 16-bit words, and the generic expansion of a mask is long: go lane by lane
    raw = f.gather(element, base, positions, mask)
    value = from_memory(f, isa, dtype, raw)
    if mask is None or other == 0:
        return value
    return f.select(mask, value, f.const(value.type, other))


def load_every_second(
    f: Fn, isa: Isa, dtype: DType, address: Val, lanes: int, *, mask: Val | None = None, other: int | float = 0
) -> Val:
    """As many elements, every second one from an address: two loads and a shuffle, where a gather would take one load
    for each lane. Nothing behind the last of them is touched."""
    element = memory_type(dtype)
    kind = vector(element, lanes)
    if mask is None:
        last = f.gep(address, lanes - 1, element)  # so that it ends with the last element
        both = f.load(kind, address, size_of(element)), f.load(kind, last, size_of(element))
        odd = range(lanes + 1, 2 * lanes, 2)
        return from_memory(f, isa, dtype, f.shuffle(*both, [*range(0, lanes, 2), *odd]))
    if not isa.masks:
        steps = f.mul(f.lane_ids(lanes, "i32"), f.const(vector("i32", lanes), 2))
        return gather_elements(f, isa, dtype, address, steps, mask=mask, other=other)
    half, none = lanes // 2, f.zero(mask.type)
    parts = []
    for k in (0, half):
        spread = f.shuffle(mask, none, [lane for j in range(half) for lane in (k + j, lanes)])
        parts.append(f.masked_load(kind, f.gep(address, 2 * k, element), spread, None, size_of(element)))
    value = from_memory(f, isa, dtype, f.shuffle(parts[0], parts[1], range(0, 2 * lanes, 2)))
    return value if other == 0 else f.select(mask, value, f.const(value.type, other))


def scatter_elements(
    f: Fn, isa: Isa, dtype: DType, value: Val, base: Val, positions: Val, *, mask: Val | None = None
) -> None:
    """One element per lane to ``base[positions]``."""
    raw = to_memory(f, isa, dtype, value)
    if positions.lanes == 1 and mask is not None:
        with f.if_(mask):
            f.store(raw, f.gep(base, positions, memory_type(dtype)))
    else:
        f.scatter(raw, base, positions, mask)


def converted(f: Fn, isa: Isa, value: Val, source: DType, target: DType) -> Val:
    """NumPy's ``astype``; a float out of an integer's range saturates, and NaN becomes 0."""
    if source is target:
        return value
    kind = register_type(target)
    if target is DType.bool:
        return f.cmp("une" if value.is_float else "ne", value, 0)
    if value.is_float and kind.startswith("i"):
        return _float_to_int(f, value, target)
    made = f.cast(value, kind, signed=is_signed(source))
    return rounded(f, isa, target, made)


def _float_to_int(f: Fn, value: Val, target: DType) -> Val:
    kind = register_type(target)
    result = vector(kind, value.lanes)
    if target.bits <= 16:
        # clamped as floats (exact for these ranges) and through i32: far shorter than the generic expansion
        low = 0 if not is_signed(target) else -(1 << (target.bits - 1))
        high = low + (1 << target.bits) - 1
        number = f.select(f.cmp("uno", value, value), 0.0, value) if low else value
        # The last bound stands second: it is what comes out where the value is NaN. It comes last because of two bounds
        # at zero in a row, as after a Relu, LLVM keeps the first, which lets NaN pass.
        number = f.quick_max(f.quick_min(f.const(number.type, high), number), low)
        return f.cast(f.cast(number, "i32"), kind)
    name = "fptosi" if is_signed(target) else "fptoui"
    source = {"float": "f32", "double": "f64"}[value.element]
    shape = f"v{value.lanes}" if value.lanes > 1 else ""
    return f.intrinsic(f"llvm.{name}.sat.{shape}{kind}.{shape}{source}", result, [value])


def reinterpreted(f: Fn, isa: Isa, value: Val, source: DType, target: DType) -> Val:
    """The same bits as another type of the same size."""
    raw = to_memory(f, isa, source, value)
    return from_memory(f, isa, target, f.bitcast(raw, vector(memory_type(target), raw.lanes)))
