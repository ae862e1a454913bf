"""Kernels for AVX-512 on any machine: the instructions for bytes and for bfloat16 that they use by name are written out
in plain IR, and the rest, which is IR without a processor's name in it, is compiled for the processor at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ranvier.codegen.launch import Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa, named, with_extensions

BYTES = with_extensions(named("avx512", "x86_64"), frozenset({"avx512vnni", "avx512vbmi"}))
BFLOATS = with_extensions(named("avx512", "x86_64"), frozenset({"avx512bf16"}))
# In integers: where processors have no instruction for it, ``fptrunc`` calls a function that not every process has.
# Ties go to even, and NaN stays quiet.
_SHORTENED = """
  %bits{n} = bitcast <16 x float> {x} to <16 x i32>
  %upper{n} = lshr <16 x i32> %bits{n}, splat (i32 16)
  %odd{n} = and <16 x i32> %upper{n}, splat (i32 1)
  %more{n} = add <16 x i32> %odd{n}, splat (i32 32767)
  %sum{n} = add <16 x i32> %bits{n}, %more{n}
  %rounded{n} = lshr <16 x i32> %sum{n}, splat (i32 16)
  %quiet{n} = or <16 x i32> %upper{n}, splat (i32 64)
  %none{n} = fcmp uno <16 x float> {x}, zeroinitializer
  %kept{n} = select <16 x i1> %none{n}, <16 x i32> %quiet{n}, <16 x i32> %rounded{n}
  %short{n} = trunc <16 x i32> %kept{n} to <16 x i16>
  %bfloat{n} = bitcast <16 x i16> %short{n} to <16 x bfloat>
"""
_WRITTEN_OUT = {
    "llvm.x86.avx512bf16.cvtneps2bf16.512": f"""
define internal <16 x bfloat> @{{name}}(<16 x float> %a) {{{{
{_SHORTENED.format(n=0, x="%a")}
  ret <16 x bfloat> %bfloat0
}}}}
""",
    # the second operand comes first
    "llvm.x86.avx512bf16.cvtne2ps2bf16.512": f"""
define internal <32 x bfloat> @{{name}}(<16 x float> %a, <16 x float> %b) {{{{
{_SHORTENED.format(n=0, x="%b")}
{_SHORTENED.format(n=1, x="%a")}
  %r = shufflevector <16 x bfloat> %bfloat0, <16 x bfloat> %bfloat1, <32 x i32> <{{all}}>
  ret <32 x bfloat> %r
}}}}
""",
    # sums of four products of unsigned and signed bytes
    "llvm.x86.avx512.vpdpbusd.512": """
define internal <16 x i32> @{name}(<16 x i32> %acc, <64 x i8> %a, <64 x i8> %b) noinline {{
  %x = zext <64 x i8> %a to <64 x i32>
  %y = sext <64 x i8> %b to <64 x i32>
  %p = mul <64 x i32> %x, %y
  %p0 = shufflevector <64 x i32> %p, <64 x i32> poison, <16 x i32> <{first}>
  %p1 = shufflevector <64 x i32> %p, <64 x i32> poison, <16 x i32> <{second}>
  %p2 = shufflevector <64 x i32> %p, <64 x i32> poison, <16 x i32> <{third}>
  %p3 = shufflevector <64 x i32> %p, <64 x i32> poison, <16 x i32> <{fourth}>
  %s0 = add <16 x i32> %p0, %p1
  %s1 = add <16 x i32> %p2, %p3
  %s2 = add <16 x i32> %s0, %s1
  %s3 = add <16 x i32> %s2, %acc
  ret <16 x i32> %s3
}}
""",
    # bytes picked by the low six bits of others
    "llvm.x86.avx512.permvar.qi.512": """
define internal <64 x i8> @{name}(<64 x i8> %a, <64 x i8> %order) {{
entry:
  %place = alloca <64 x i8>, align 64
  %made = alloca <64 x i8>, align 64
  %orders = alloca <64 x i8>, align 64
  store <64 x i8> %a, ptr %place
  store <64 x i8> %order, ptr %orders
  br label %next
next:
  %k = phi i64 [ 0, %entry ], [ %more, %next ]
  %where = getelementptr i8, ptr %orders, i64 %k
  %o = load i8, ptr %where
  %low = and i8 %o, 63
  %index = zext i8 %low to i64
  %from = getelementptr i8, ptr %place, i64 %index
  %byte = load i8, ptr %from
  %to = getelementptr i8, ptr %made, i64 %k
  store i8 %byte, ptr %to
  %more = add i64 %k, 1
  %again = icmp ult i64 %more, 64
  br i1 %again, label %next, label %done
done:
  %result = load <64 x i8>, ptr %made
  ret <64 x i8> %result
}}
""",
}
_NTHS = {
    name: ", ".join(f"i32 {4 * k + n}" for k in range(16))
    for n, name in enumerate(("first", "second", "third", "fourth"))
}
_NTHS["all"] = ", ".join(f"i32 {k}" for k in range(32))


def written_out(text: str) -> str:
    """IR with functions of its own instead of these instructions."""
    for number, (name, body) in enumerate(_WRITTEN_OUT.items()):
        if f"@{name}(" not in text:
            continue
        own = f"written_out_{number}"
        text = re.sub(rf"declare [^\n]*@{re.escape(name)}\([^\n]*\n", "", text).replace(f"@{name}(", f"@{own}(")
        text += body.format(name=own, **_NTHS)
    assert not re.search(r'@llvm\.x86| asm "[^"]', text), "an instruction that is not written out"
    return text


def launches_here(launches: Sequence[Launch], isa: Isa = BYTES) -> list[Launch]:
    """Launches of kernels for an instruction set as those of kernels that any machine runs."""
    return [
        replace(
            launch,
            spec=_spec_here(launch.spec, isa),
            buffers=tuple(Code(_spec_here(b.spec, isa)) if isinstance(b, Code) else b for b in launch.buffers),
        )
        for launch in launches
    ]


def _spec_here(spec: KernelSpec, isa: Isa) -> KernelSpec:
    def emit(module: Module, symbol: str, _: Isa) -> None:
        inner = Module(extremes=isa.extremes)
        spec.emit(inner, symbol, isa)
        module.globals.append(written_out(str(inner)))

    return KernelSpec(spec.name, ("written out", *spec.key), emit)
