"""Products with weights of few bits: codes are decoded in registers, or panel by panel near the processor."""

from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.coupled import couples
from ranvier.codegen.llvm.coded.pack import CodedB, Groups, pack_coded
from ranvier.codegen.llvm.coded.product import Accuracy, coded_matmul

__all__ = ["Accuracy", "CodedB", "Coding", "Groups", "coded_matmul", "couples", "pack_coded"]
