"""LLVM IR and loop kernels that several tests load."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.cpu.custom import Scalar, Signature, Size, Tensor

F32 = DType.float32

SAXPY = """\
define void @saxpy(ptr %x, ptr %y, float %a, i64 %n, i64 %tile, i64 %block) {
entry:
  %first = mul i64 %tile, %block
  %past = add i64 %first, %block
  %inside = icmp slt i64 %past, %n
  %last = select i1 %inside, i64 %past, i64 %n
  %any = icmp slt i64 %first, %last
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ %first, %entry ], [ %next, %loop ]
  %px = getelementptr float, ptr %x, i64 %i
  %py = getelementptr float, ptr %y, i64 %i
  %vx = load float, ptr %px
  %vy = load float, ptr %py
  %ax = fmul float %vx, %a
  %sum = fadd float %ax, %vy
  store float %sum, ptr %py
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %last
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""
SAXPY_SIGNATURE = Signature((Tensor("x", F32, ("n",)), Tensor("y", F32, ("n",), "inout"), Scalar("a", F32), Size("n")))


def saxpy(loops: Any, x: Any, y: Any, a: Any, n: int) -> Any:
    return loops.store(y, a * x + y)


def around(body: str, parameters: str = "ptr %x, i64 %tile, i64 %block", *, before: str = "") -> str:
    """A kernel called ``k`` of one tensor with these instructions."""
    return f"{before}\ndefine void @k({parameters}) {{\n{body}\n  ret void\n}}\n"


ONE = Signature((Tensor("x", F32, ("n",), "inout"),))
