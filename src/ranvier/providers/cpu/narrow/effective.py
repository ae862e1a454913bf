"""The precision a processor can do, and why it is not the one that was asked for."""

from __future__ import annotations

from ranvier.codegen.llvm.isa import Isa

# For each precision, instructions that multiply such operands, any of which will do.
_PRODUCTS = {"bf16": ("amx-bf16", "avx512bf16"), "fp16": ("amx-bf16", "avx512bf16", "avx512fp16", "fullfp16")}


def effective(asked: str, isa: Isa) -> tuple[str, str]:
    """One of "f32", "bf16" and "fp16", and the reason where it is another than was asked for."""
    if asked not in _PRODUCTS:
        return "f32", ""
    if any(isa.has(name) for name in _PRODUCTS[asked]):
        return asked, ""
    return "f32", f"{isa.name} has no {asked} products ({' or '.join(_PRODUCTS[asked])})"
