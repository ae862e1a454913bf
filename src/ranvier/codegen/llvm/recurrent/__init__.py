"""LSTM, GRU and RNN: input projections as one product, then a time loop with all gates fused."""

from ranvier.codegen.llvm.recurrent.lower import Layer, Operands, Results, recurrent, supported

__all__ = ["Layer", "Operands", "Results", "recurrent", "supported"]
