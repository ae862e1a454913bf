"""The CPU provider: partitions become machine code, made in Python through LLVM."""
