"""Matrix multiplication of float32 and float64: micro-kernels as data, packing, and the driver that blocks the work."""

from ranvier.codegen.llvm.gemm.pack import PackedB, pack_b
from ranvier.codegen.llvm.gemm.product import matmul

__all__ = ["PackedB", "matmul", "pack_b"]
