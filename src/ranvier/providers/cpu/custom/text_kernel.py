"""Kernels given as LLVM IR: what the text may hold, how LLVM improves it, and the function that launches call."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, KernelError, nearest
from ranvier.providers.cpu.custom.signature import Buffer, Local, Scalar, Signature, Size, Tensor

_MATH = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs floor fma fmax"
    " fmin fmod hypot ldexp lgamma log log10 log1p log2 nearbyint pow remainder rint round sin sinh sqrt tan tanh"
    " tgamma trunc"
)
# functions of the process that a kernel may call: they touch nothing but their arguments
ALLOWED = frozenset({"memcmp", "memcpy", "memmove", "memset", *(f"{n}{f}" for n in _MATH.split() for f in ("", "f"))})
# LLVM's own functions that would end the process or reach beyond the kernel
_REFUSED = re.compile(
    r"llvm\.(trap|debugtrap|ubsantrap|eh\.|coro\.|gc|init\.trampoline|adjust\.trampoline|returnaddress|frameaddress"
    r"|addressofreturnaddress|sponentry|write_register|read_register|call\.preallocated|clear_cache|stackrestore)"
)
_ASSEMBLY = re.compile(r"(?<![%@\w.$-])asm\b")
_QUOTED = re.compile(r'"[^"]*"')
_AT_LINE = re.compile(r"<string>:(\d+):(\d+): error: ([^\n]*)")
_TYPES = {DType.float16: "half", DType.float32: "float", DType.float64: "double", DType.bool: "i8"}


def llvm_type(dtype: DType) -> str:
    return _TYPES.get(dtype) or f"i{8 * dtype.numpy.itemsize}"


def function_type(signature: Signature) -> str:
    """The type, as LLVM writes it, of the function that a signature stands for."""
    kinds = [
        llvm_type(p.dtype) if isinstance(p, Scalar) else "i64" if isinstance(p, Size) else "ptr"
        for p in signature.params
    ]
    return f"void ({', '.join([*kinds, *['i64'] * (2 * signature.axes)])})"


def text_spec(text: str, name: str, signature: Signature, isa: Isa) -> KernelSpec:
    """The kernel that launches call, made of checked text."""
    improved = _improved(text, name, signature, isa)
    emit = functools.partial(_emit, improved, name, signature)
    digest = hashlib.sha256(improved.encode()).hexdigest()
    return KernelSpec(f"custom {name}", ("custom", name, str(signature), signature.axes, digest), emit)


def _improved(text: str, name: str, signature: Signature, isa: Isa) -> str:
    """The text after LLVM's own optimisation, with all that it defines visible to itself only."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    with llvm.create_context() as context:  # which has to outlive the module
        try:
            parsed = llvm.parse_assembly(text, context)
        except RuntimeError as error:
            raise KernelError(f"kernel {name!r}: {_located(str(error))}", provider="cpu") from None
        with parsed as module:
            try:
                module.verify()
            except RuntimeError as error:
                raise KernelError(f"kernel {name!r}: {_located(str(error))}", provider="cpu") from None
            _check(module, name, signature)
            _optimise(llvm, module, name, isa)
            return str(module)


def _optimise(llvm: Any, module: Any, name: str, isa: Isa) -> None:
    """LLVM's usual passes, loops vectorised for this machine; then only the kernel's caller can see the function."""
    module.triple = llvm.get_process_triple()
    function = module.get_function(name)
    for each in [*module.functions, *module.global_variables]:
        if not each.is_declaration and each.name != name:
            each.linkage = "internal"
    target = llvm.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    with llvm.create_pass_builder(machine, tuning) as builder, builder.getModulePassManager() as passes:
        passes.run(module, builder)
    function.linkage = "internal"  # before, it would have been taken for unused
    if "noinline" not in str(list(function.attributes)):
        function.add_function_attribute("alwaysinline")


def _located(message: str) -> str:
    """What LLVM said, with the line of the text."""
    found = _AT_LINE.search(message)
    if found is None:
        return f"LLVM refuses it: {' '.join(message.split())}"
    return f"line {found[1]}, column {found[2]}: {found[3]}"


def _check(module: Any, name: str, signature: Signature) -> None:
    defined = {f.name: f for f in module.functions if not f.is_declaration}
    if name not in defined:
        raise InvalidConfig(f"kernel {name!r}: the text defines no function of this name{nearest(name, defined)}")
    wanted, found = function_type(signature), str(defined[name].global_value_type)
    if wanted != found:
        raise InvalidConfig(
            f"kernel {name!r}: for {signature} over {signature.axes} axes the function must be {wanted}, it is {found}"
        )
    for function in module.functions:
        if not function.is_declaration:
            continue
        own = function.name.startswith("llvm.")
        if _REFUSED.match(function.name) or not (own or function.name in ALLOWED):
            raise InvalidConfig(f"kernel {name!r}: calls {function.name!r}, which kernels may not call")
    for variable in module.global_variables:
        if variable.is_declaration or variable.name.startswith("llvm."):
            raise InvalidConfig(f"kernel {name!r}: refers to {variable.name!r}, which is outside of it")
    plain = _QUOTED.sub('""', str(module))
    if _ASSEMBLY.search(plain):
        raise InvalidConfig(f"kernel {name!r}: holds assembly, which LLVM does not look into")
    for line in plain.splitlines():
        if re.match(r"@\S+ = .*\b(alias|ifunc)\b", line):
            raise InvalidConfig(f"kernel {name!r}: other names of functions are not allowed: {line.strip()[:80]}")


def _emit(text: str, name: str, signature: Signature, module: Module, symbol: str, isa: Isa) -> None:
    module.globals.append(f"{text}\n{_caller(name, signature, symbol)}")


def _caller(name: str, signature: Signature, symbol: str) -> str:
    """A kernel as launches call them: it finds the arguments and calls the function for tile after tile.

    ``bufs`` are the tensors and buffers, then the scalars; ``dims`` the grid, the block, the sizes and where each
    piece of local memory starts.
    """
    axes = signature.axes
    lines = [f"define void @{symbol}(ptr %bufs, ptr %dims, i64 %begin, i64 %end, ptr %scratch) {{", "entry:"]

    def at(result: str, kind: str, base: str, index: int, bytes_each: int = 8) -> str:
        lines.append(f"  %{result}_at = getelementptr i8, ptr %{base}, i64 {index * bytes_each}")
        lines.append(f"  %{result} = load {kind}, ptr %{result}_at")
        return f"{kind} %{result}"

    arrays = sum(isinstance(p, Tensor | Buffer) for p in signature.params)
    at("rv_scalars", "ptr", "bufs", arrays)
    grid = [at(f"rv_grid{a}", "i64", "dims", a) for a in range(axes)]
    block = [at(f"rv_block{a}", "i64", "dims", axes + a) for a in range(axes)]
    passed: list[str] = []
    buffers = scalars = numbers = 0
    for k, param in enumerate(signature.params):
        result = f"rv_arg{k}"
        if isinstance(param, Tensor | Buffer):
            passed.append(at(result, "ptr", "bufs", buffers))
            buffers += 1
        elif isinstance(param, Scalar):
            passed.append(at(result, llvm_type(param.dtype), "rv_scalars", scalars))
            scalars += 1
        else:
            found = at(f"{result}_number", "i64", "dims", 2 * axes + numbers)
            numbers += 1
            if isinstance(param, Local):
                lines.append(f"  %{result} = getelementptr i8, ptr %scratch, {found}")
                found = f"ptr %{result}"
            passed.append(found)
    lines += [
        "  %rv_any = icmp slt i64 %begin, %end",
        "  br i1 %rv_any, label %rv_tile, label %rv_done",
        "rv_tile:",
        "  %rv_t = phi i64 [ %begin, %entry ], [ %rv_next, %rv_tile ]",
    ]
    left, places = "%rv_t", [""] * axes
    for a in reversed(range(axes)):  # the last axis runs fastest
        size = grid[a].split()[1]
        lines.append(f"  %rv_i{a} = urem i64 {left}, {size}")
        lines.append(f"  %rv_left{a} = udiv i64 {left}, {size}")
        left, places[a] = f"%rv_left{a}", f"i64 %rv_i{a}"
    lines += [
        f"  call void @{_quoted(name)}({', '.join([*passed, *places, *block])})",
        "  %rv_next = add i64 %rv_t, 1",
        "  %rv_more = icmp slt i64 %rv_next, %end",
        "  br i1 %rv_more, label %rv_tile, label %rv_done",
        "rv_done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_.$][\w.$]*", name, re.ASCII) else f'"{name}"'
