"""Element types narrower than what machines compute with: int4, int2, float8 and their relatives.

Such tensors hold one byte per element. They are read as uint8 codes, computed with as numbers, and written as codes;
only conversions and views take them.
"""

from __future__ import annotations

from typing import Literal

from ranvier.codegen.definitions.exprs import add, cast, compare, const, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, NARROW
from ranvier.codegen.loops.ir import Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.records import dataclass

# lowest and highest number
NARROW_INTEGERS: dict[DType, tuple[int, int]] = {
    DType.int4: (-8, 7),
    DType.uint4: (0, 15),
    DType.int2: (-2, 1),
    DType.uint2: (0, 3),
}


@dataclass(frozen=True)
class Small:
    """A float format of at most 8 bits: a sign, ``exponent`` and ``mantissa`` bits.

    ``special``: "none" (every code is a number), "nan" (all ones is NaN), "ieee" (the highest exponent is infinity and
    NaN), "fnuz" (the code of minus zero is NaN).
    """

    exponent: int
    mantissa: int
    bias: int
    special: Literal["none", "nan", "ieee", "fnuz"]

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def largest(self) -> int:
        """The code of the largest finite number."""
        return self.sign - {"none": 1, "nan": 2, "ieee": (1 << self.mantissa) + 1, "fnuz": 1}[self.special]


FORMATS: dict[DType, Small] = {
    DType.float8_e4m3fn: Small(4, 3, 7, "nan"),
    DType.float8_e5m2: Small(5, 2, 15, "ieee"),
    DType.float8_e4m3fnuz: Small(4, 3, 8, "fnuz"),
    DType.float8_e5m2fnuz: Small(5, 2, 16, "fnuz"),
    DType.float4_e2m1fn: Small(2, 1, 1, "none"),
    DType.float6_e2m3fn: Small(2, 3, 1, "none"),
    DType.float6_e3m2fn: Small(3, 2, 3, "none"),
}
_EXPONENTS = DType.float8_e8m0fnu
_INT, _FLOAT = DType.int32, DType.float32


def as_bytes(b: Definitions, value: Value, dtype: DType = DType.uint8, out: Value | None = None) -> Value:
    """The same bytes as elements of another one-byte type."""
    return b.alias(
        value,
        lambda view: View(view.storage, dtype, view.shape, view.strides, view.offset),
        b.shape(value),
        out,
        dtype,
    )


# -- codes to numbers -------------------------------------------------------------------------------------------------


def from_code(code: Expr, dtype: DType) -> Expr:
    """The number a uint8 code stands for; values of other types are numbers already."""
    if dtype in NARROW_INTEGERS:
        low, high = NARROW_INTEGERS[dtype]
        kept = op("bitand", code, const(high - low, code))
        if low == 0:
            return kept
        turned = op("bits", op("bitxor", kept, const(-low, kept)), dtype=DType.int8)
        return sub(turned, const(-low, turned))
    if dtype is _EXPONENTS:
        return _power_of_two(cast(code, _INT))
    if dtype in FORMATS:
        return _decoded(cast(code, _INT), FORMATS[dtype])
    return code


def _power_of_two(code: Expr) -> Expr:
    tiny = 1 << 22  # 2^-127 is no normal float32
    bits = where(compare("eq", code, const(0, code)), const(tiny, code), op("shl", code, const(23, code)))
    number = op("bits", bits, dtype=_FLOAT)
    return where(compare("eq", code, const(255, code)), const(float("nan"), _FLOAT), number)


def _decoded(code: Expr, form: Small) -> Expr:
    """Exponent and mantissa moved to where float32 has them; the scale makes up for the other bias."""
    magnitude = op("bitand", code, const(form.sign - 1, code))
    moved = op("shl", magnitude, const(23 - form.mantissa, code))
    number = mul(op("bits", moved, dtype=_FLOAT), const(2.0 ** (127 - form.bias), _FLOAT))
    if form.special == "ieee":
        infinite = const(form.largest + 1, code)
        number = where(compare("eq", magnitude, infinite), const(float("inf"), _FLOAT), number)
        number = where(compare("gt", magnitude, infinite), const(float("nan"), _FLOAT), number)
    elif form.special == "nan":
        number = where(compare("gt", magnitude, const(form.largest, code)), const(float("nan"), _FLOAT), number)
    negative = compare("ne", op("bitand", code, const(form.sign, code)), const(0, code))
    number = where(negative, op("neg", number), number)
    if form.special == "fnuz":
        number = where(compare("eq", code, const(form.sign, code)), const(float("nan"), _FLOAT), number)
    return number


# -- numbers to codes -------------------------------------------------------------------------------------------------


def to_code(x: Expr, dtype: DType, saturate: bool = True, round_mode: str = "up") -> Expr:
    """The uint8 code of a number: integers lose their upper bits, floats round half to even."""
    if dtype in NARROW_INTEGERS:
        low, high = NARROW_INTEGERS[dtype]
        code = cast(cast(x, DType.int64 if x.dtype is DType.float64 else _INT) if x.dtype.is_float else x, DType.uint8)
        return op("bitand", code, const(high - low, code))
    number = cast(x, _FLOAT)
    if dtype is _EXPONENTS:
        return cast(_exponent(number, round_mode), DType.uint8)
    return cast(_encoded(number, FORMATS[dtype], saturate), DType.uint8)


def _encoded(x: Expr, form: Small, saturate: bool) -> Expr:
    whole = op("bits", x, dtype=_INT)
    bits = op("bitand", whole, const(0x7FFFFFFF, whole))
    size = op("bits", bits, dtype=_FLOAT)
    shift = const(23 - form.mantissa, bits)
    # normal numbers: half a unit, less what makes ties even, and the exponent's other bias
    odd = op("bitand", op("shr", bits, shift), const(1, bits))
    rounded = add(add(bits, odd), const((1 << (22 - form.mantissa)) - 1, bits))
    normal = sub(op("shr", rounded, shift), const((127 - form.bias) << form.mantissa, bits))
    # below, an addition rounds to the unit that the smallest numbers are multiples of
    least = 1 - form.bias
    unit = const(2.0 ** (least - form.mantissa + 23), _FLOAT)
    small = sub(op("bits", add(size, unit), dtype=_INT), op("bits", unit, dtype=_INT))
    code = where(compare("lt", size, const(2.0**least, _FLOAT)), small, normal)
    top = const(form.largest, code)
    if saturate or form.special == "none":
        code = op("min", code, top)
    else:
        beyond = {"nan": form.sign - 1, "ieee": form.largest + 1, "fnuz": form.sign}[form.special]
        code = where(compare("gt", code, top), const(beyond, code), code)
    negative = compare("lt", whole, const(0, whole))
    signed = op("bitor", code, const(form.sign, code))
    if form.special == "fnuz":
        signed = where(compare("eq", code, const(0, code)), code, signed)  # there is no minus zero
    code = where(negative, signed, code)
    nan = {"none": form.sign, "nan": form.sign - 1, "ieee": form.sign - 2, "fnuz": form.sign}[form.special]
    return where(op("isnan", x, dtype=DType.bool), const(nan, code), code)


def _exponent(x: Expr, round_mode: str) -> Expr:
    """float8_e8m0fnu: the exponent alone, 255 for NaN; what is too small or large becomes the nearest there is."""
    bits = op("bitand", op("bits", x, dtype=_INT), const(0x7FFFFFFF, _INT))
    exponent = op("shr", bits, const(23, bits))
    fraction = op("bitand", bits, const(0x7FFFFF, bits))
    if round_mode == "down":
        code = exponent
    else:
        up = "gt" if round_mode == "up" else "ge"
        normal, tiny = (0, 1 << 22) if round_mode == "up" else (1 << 22, 3 << 21)
        bound = where(compare("eq", exponent, const(0, bits)), const(tiny, bits), const(normal, bits))
        code = add(exponent, cast(compare(up, fraction, bound), _INT))
    code = op("min", code, const(254, bits))
    return where(op("isnan", x, dtype=DType.bool), const(255, code), code)


# -- operators --------------------------------------------------------------------------------------------------------

_LONG = frozenset({DType.float64, DType.int64, DType.uint64})


def _types(node: Node) -> tuple[DType | None, DType | None]:
    source, out = node.inputs[0], node.outputs[0].type
    found = source.type.dtype if source is not None and isinstance(source.type, TensorType) else None
    return found, out.dtype if isinstance(out, TensorType) else None


def _converts(node: Node) -> str | None:
    source, target = _types(node)
    if target in NARROW and target not in NARROW_INTEGERS and source in _LONG:
        return f"{source} to {target} would be rounded twice"
    if target is _EXPONENTS and not node.attrs.get("saturate", 1):
        return f"{target} without saturation"
    return None


@lowers("Cast", "CastLike", dtypes=ALL | NARROW, check=_converts)
def convert(n: NodeView, b: Definitions) -> None:
    source = n.dtype(0)
    to = n.dtype(1) if n.op == "CastLike" else from_onnx(int(n.attr("to")))
    if source not in NARROW and to not in NARROW:
        b.pointwise([n.input(0)], lambda e: cast(e[0], to), to, out=n.outputs[0])
        return
    if source is to:
        b.identity(n.input(0), out=n.outputs[0])
        return
    x = as_bytes(b, n.input(0)) if source in NARROW else n.input(0)
    if to not in NARROW:
        b.pointwise([x], lambda e: cast(from_code(e[0], source), to), to, out=n.outputs[0])
        return
    saturate, mode = bool(n.attr("saturate", 1)), str(n.attr("round_mode", "up"))
    codes = b.pointwise([x], lambda e: to_code(from_code(e[0], source), to, saturate, mode), DType.uint8)
    as_bytes(b, codes, to, n.outputs[0])
