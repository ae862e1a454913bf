"""Products by tiles: the matrix unit of newer x86 processors (AMX), for bfloat16 and 8-bit integers.

:mod:`tiles` writes its instructions, :mod:`micro` is the micro-kernel that stands where those of ``gemm`` do,
:mod:`later` writes its sums while it makes the next ones, and :mod:`rows` copies scattered rows together for it.
"""
