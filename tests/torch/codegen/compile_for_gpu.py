"""Compiles kernels of common nests for a GPU that need not be there: the interpreter lets through what this does not.

Run by a test in a process of its own, as kernels of one process are either all interpreted or all compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ranvier.codegen.loops.ir import Epilogue, Load, Nest, Op, Operand, Result, Scan
from ranvier.codegen.storage import View
from ranvier.codegen.triton.conv import Sliding, convolution
from ranvier.codegen.triton.gemm import product
from ranvier.codegen.triton.library import Call, Printed, function, kernel
from ranvier.codegen.triton.many import merged
from ranvier.codegen.triton.printer import Source
from ranvier.dtypes import DType
from tests.codegen.nest_makers import copy, elementwise, reduction

F16, F32, I32 = DType.float16, DType.float32, DType.int32
_TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "int64": "*i64", "int8": "*i8"}
_MULTIPLE: list[Any] = [["tt.divisibility", 16]]


def compiled(source: Source) -> Any:
    """A kernel for compute capability 9.0, with aligned addresses, as the library would have it compiled."""
    made = function(source.text, source.name)
    kinds: dict[str, str] = {}
    fixed: dict[tuple[int, ...], int] = {}
    known: dict[tuple[int, ...], Any] = {}
    values = [None] * len(source.pointers) + list(source.numbers)
    for k, name in enumerate(made.arg_names):
        if k < len(source.pointers):
            kinds[name], known[k,] = _TYPES[source.pointers[k].dtype], _MULTIPLE
        elif k < len(values) and values[k] != 1:
            kinds[name] = "i32"
            if int(values[k] or 0) % 16 == 0:
                known[k,] = _MULTIPLE
        else:
            kinds[name] = "constexpr"
            fixed[k,] = 1 if k < len(values) else source.constants[k - len(values)][1]
    options = {"num_warps": source.warps, "num_stages": source.stages}
    return triton.compile(ASTSource(made, kinds, fixed, known), target=GPUTarget("cuda", 90, 32), options=options)


def examples() -> Iterator[tuple[str, Printed]]:
    made = View.temporary
    yield "copy", kernel(copy(made(F32, (512, 512)), made(F32, (512, 512))))
    yield "transpose", kernel(copy(made(F16, (512, 512)), made(F16, (512, 512)).transposed((1, 0))))
    names = ("tanh", "log1p", "softplus", "round", "sign", "sigmoid")

    def chained(x: Any) -> Any:
        for name in names:
            x = Op(name, (x,), F32)
        return x

    yield "functions", kernel(elementwise(made(F32, (512, 512)), [made(F32, (512, 512))], chained))
    integers = [made(I32, (512, 512)), made(I32, (512,))]
    yield (
        "integers",
        kernel(elementwise(made(I32, (512, 512)), integers, lambda a, b: Op("mod", (Op("pow", (a, b), I32), b), I32))),
    )
    several = [
        elementwise(made(F32, (n,)), [made(F32, (n,))], lambda x: Op("tanh", (x,), F32)) for n in (4096, 512, 80)
    ]
    yield "many", Printed((Call(merged([kernel(nest).calls[0].source for nest in several])),))
    sums = [kernel(reduction(made(F32, (1, 256)), made(F32, (1024, 256)), [0], "sum")) for _ in range(3)]
    calls = zip(*([call.source for call in each.calls] for each in sums))
    yield "sums", Printed(tuple(Call(merged(list(each))) for each in calls))
    yield "columns", kernel(reduction(made(F32, (64, 1, 1024)), made(F32, (64, 32, 1024)), [1], "max"))
    yield "argmax", kernel(reduction(made(DType.int64, (512, 1)), made(F32, (512, 30000)), [1], "argmax"))
    a, out = made(F32, (64, 20000)), made(F32, (64, 20000))
    scan = Scan("sum", Load(0, F32), 1, F32, True, True)
    yield "scan", kernel(Nest(a.shape, (Operand(a, a.strides), Operand(out, out.strides)), (scan,), frozenset({1})))
    bias = made(F16, (2048,))
    value = Op("add", (Result(0, F32), Op("cast", (Load(0, F16),), F32)), F32)
    epilogue = Epilogue(value, (Operand(bias, (0, 0, 1)),))
    sides = (made(F16, (1, 2048, 2048)) for _ in range(3))
    yield "product", product(*sides, epilogue)
    few = made(F16, (1, 3, 4096)), made(F16, (1, 2048, 4096)).transposed((0, 2, 1)), made(F16, (1, 3, 2048))
    yield "few rows", product(*few, epilogue)
    last = (0, 2, 3, 1)
    filters = made(F16, (2048, 256, 3, 3), last)
    image, pixels = made(F16, (32, 256, 14, 14), last), made(F16, (1, 32 * 14 * 14, 2048))
    yield "convolution", convolution(image, filters, pixels, (14, 14), Sliding((1, 1), (1, 1), (1, 1)), epilogue)
    image, pixels = made(F16, (1, 256, 14, 14), last), made(F16, (1, 7 * 7, 2048))
    yield "few pixels", convolution(image, filters, pixels, (7, 7), Sliding((2, 2), (1, 1), (1, 1)), epilogue)


def main() -> None:
    found = {}
    for name, made in examples():
        found[name] = "\n".join(compiled(call.source).asm["ptx"] for call in made.calls)
    marks = ("ld.global.v4", "st.global.v4", "wgmma", "st.local")
    json.dump({name: [mark for mark in marks if mark in text] for name, text in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
