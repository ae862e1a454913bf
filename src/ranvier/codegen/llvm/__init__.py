"""Machine code for CPUs: LLVM IR written as text, compiled by llvmlite, cached as objects, linked by ORC."""
