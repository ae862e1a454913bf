"""What the names in a PyTorch pickle mean: storages, the tensors that are views of them, and what is left aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.records import dataclass
from ranvier.weights.formats.pickles import Attributes, Call, Global, mapping, shown
from ranvier.weights.stored import row_major

_STORAGES = {
    "DoubleStorage": DType.float64,
    "FloatStorage": DType.float32,
    "HalfStorage": DType.float16,
    "BFloat16Storage": DType.bfloat16,
    "LongStorage": DType.int64,
    "IntStorage": DType.int32,
    "ShortStorage": DType.int16,
    "CharStorage": DType.int8,
    "ByteStorage": DType.uint8,
    "BoolStorage": DType.bool,
    "ComplexFloatStorage": DType.complex64,
    "ComplexDoubleStorage": DType.complex128,
    "UntypedStorage": DType.uint8,
}
_DTYPES = {
    "float64": DType.float64,
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
    "int64": DType.int64,
    "int32": DType.int32,
    "int16": DType.int16,
    "int8": DType.int8,
    "uint8": DType.uint8,
    "uint16": DType.uint16,
    "uint32": DType.uint32,
    "uint64": DType.uint64,
    "bool": DType.bool,
    "complex64": DType.complex64,
    "complex128": DType.complex128,
    "float8_e4m3fn": DType.float8_e4m3fn,
    "float8_e4m3fnuz": DType.float8_e4m3fnuz,
    "float8_e5m2": DType.float8_e5m2,
    "float8_e5m2fnuz": DType.float8_e5m2fnuz,
    "float8_e8m0fnu": DType.float8_e8m0fnu,
    "float4_e2m1fn_x2": DType.float4_e2m1fn,  # its shapes count pairs
}
# what stands beside tensors in checkpoints; the values are of no use here, and nothing is made of them
_ASIDE = {
    "__builtin__.bytearray", "__builtin__.complex", "__builtin__.frozenset", "__builtin__.set", "_codecs.encode",
    "argparse.Namespace", "builtins.bytearray", "builtins.complex", "builtins.frozenset", "builtins.set",
    "datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy.core.numeric._frombuffer",
    "numpy.dtype", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath", "torch.Size", "torch.device",
}  # fmt: skip
_LAYOUT, _DENSE = "torch.serialization._get_layout", ("torch.strided",)
_DICTIONARIES = {"collections.Counter", "collections.OrderedDict", "collections.defaultdict"}
# tensors that are no views of plain elements, by what in their pickles tells them from others
_OTHERS = {
    _LAYOUT: "a sparse tensor; save it after to_dense()",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor; save it after to_dense()",
    "torch._utils._rebuild_qtensor": "a quantized tensor; save it after dequantize(), or its int_repr() with scales",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor of the device 'meta', which has no data",
    "torch._utils._rebuild_nested_tensor": "a nested tensor; save its parts, which unbind() gives",
}
_QUANTIZED = {"QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage"}
_REBUILD = "torch._utils._rebuild_tensor"  # as versions before 0.4 wrote it; with "_v2" or "_v3" behind it since
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_MODULES = ("__torch__.", "torch.jit._pickle.")  # classes of a TorchScript program, and what tells its types
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_TYPES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}


@dataclass(frozen=True)
class Storage:
    """Elements that tensors are views of."""

    dtype: DType
    key: str
    count: int


@dataclass(frozen=True)
class View:
    """A tensor as the pickle describes it."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(file: str) -> Callable[[Any], Storage]:
    """The storage that a persistent id stands for, for the pickles of this file."""

    def persistent(identity: Any) -> Storage:
        if isinstance(identity, tuple) and identity[:1] == ("module",):
            raise WeightError(f"{file!r} holds a whole module, which is a program; save its state_dict")
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise WeightError(f"{file!r}: the pickle refers to {shown(identity)}, which is no storage")
        _, kind, key, _, count = identity[:5]
        if len(identity) > 5 and identity[5] is not None:
            raise WeightError(f"{file!r}: storage {shown(key)} is a view of another, as versions before 0.4 wrote them")
        name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
        if name in _QUANTIZED:
            raise WeightError(f"{file!r} holds {_OTHERS['torch._utils._rebuild_qtensor']}")
        if name not in _STORAGES or not isinstance(key, str) or not _is_size(count):
            raise WeightError(f"{file!r}: storage {shown(key)} of the unknown kind {name or shown(kind)}")
        return Storage(_STORAGES[name], key, count)

    return persistent


def rebuilt(file: str) -> Callable[[str, tuple[Any, ...]], Any]:
    """What a called name gives, for the pickles of this file: a tensor, a dictionary, or a record of the call."""

    def call(function: str, arguments: tuple[Any, ...]) -> Any:
        if function in _DICTIONARIES:
            # of pairs, of a dictionary, of nothing; a defaultdict first of all of what makes its defaults
            given = (*arguments, [])[function == "collections.defaultdict" and len(arguments) > 0]
            if not isinstance(given, list | dict):
                raise WeightError(f"{file!r}: the pickle makes a dictionary of {shown(given)}")
            return mapping(given.items() if isinstance(given, dict) else given)
        if function in _ASIDE or (function == _LAYOUT and arguments == _DENSE):
            return Call(function, arguments)
        if function in _PARAMETERS:
            return arguments[0]
        if function in (_REBUILD, f"{_REBUILD}_v2", f"{_REBUILD}_v3"):
            return _view(file, function, arguments)
        if function == _OF_TYPE:  # a tensor with attributes, or of a class of its own, whose meaning is not ours
            inner, kind, given = arguments[:3]
            if (
                isinstance(inner, Global)
                and isinstance(kind, Global)
                and kind.name in _TYPES
                and inner.name != _OF_TYPE
            ):
                return call(inner.name, given)
            raise WeightError(f"{file!r}: the pickle has a tensor of the unknown class {shown(kind)}")
        if function in _OTHERS:
            raise WeightError(f"{file!r} holds {_OTHERS[function]}")
        raise WeightError(
            f"{file!r}: the pickle calls {function[:100]}, which a file of weights has no need of; "
            "save a state_dict, or tensors alone"
        )

    return call


def scripted(file: str) -> Callable[[str, tuple[Any, ...]], Any]:
    """The same for a TorchScript program: its modules are their attributes, and lists say what they are lists of."""
    plain = rebuilt(file)

    def call(function: str, arguments: tuple[Any, ...]) -> Any:
        if not function.startswith(_MODULES):
            return plain(function, arguments)
        return Attributes() if function.startswith(_MODULES[0]) else arguments[0]

    return call


def _is_size(value: Any) -> bool:
    """Whether it is a number of elements. A pickle has whole numbers of millions of digits too, whose products take
    minutes."""
    return type(value) is int and 0 <= value < 1 << 63


def _view(file: str, function: str, arguments: tuple[Any, ...]) -> View:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage):
        raise WeightError(f"{file!r}: a tensor without a storage")
    dtype, others = storage.dtype, arguments[6:]
    if function == f"{_REBUILD}_v3":
        named = others[0].name if others and isinstance(others[0], Global) else ""
        if named.rpartition(".")[2] not in _DTYPES:
            raise WeightError(f"{file!r}: a tensor of the unknown element type {named!r}")
        dtype, others = _DTYPES[named.rpartition(".")[2]], others[1:]
    if others and isinstance(others[0], dict) and (others[0].get("conj") or others[0].get("neg")):
        raise WeightError(f"{file!r}: a tensor that is yet to be conjugated or negated; save it after resolve_conj()")
    if isinstance(shape, Call):
        shape = shape.arguments[0]
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(map(_is_size, numbers)):
        raise WeightError(f"{file!r}: a tensor whose offset, shape and strides are not whole numbers that fit together")
    shape, strides = tuple(shape), tuple(strides)
    if dtype.is_packed:
        if not shape or strides != row_major(shape):
            raise WeightError(f"{file!r}: a tensor of pairs of {dtype} that do not lie one after another")
        return View(storage, dtype, offset, (*shape[:-1], 2 * shape[-1]), ())
    return View(storage, dtype, offset, shape, strides)
