"""LSTM, GRU and RNN: input projections as one product, then a time loop with all gates fused; an LSTM's way back."""

from ranvier.codegen.llvm.recurrent.lower import Layer, Operands, Results, recurrent, supported
from ranvier.codegen.llvm.recurrent.lower_slopes import Kept, Slopes, lstm_slopes

__all__ = ["Kept", "Layer", "Operands", "Results", "Slopes", "lstm_slopes", "recurrent", "supported"]
