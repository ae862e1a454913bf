"""Numbers as codes of few bits: schemes, ranges from samples, and the packings checkpoints use."""

from __future__ import annotations

from ranvier.quantize.awq import Awq
from ranvier.quantize.base import Dequantize, Quantize, Quantized
from ranvier.quantize.floats import Float8, Nf4
from ranvier.quantize.gptq import Gptq
from ranvier.quantize.integers import Integers
from ranvier.quantize.moments import InputMoments
from ranvier.quantize.observers import Entropy, MeanSquare, MinMax, Observer, Percentile, observer
from ranvier.quantize.schemes import register_scheme, scheme, scheme_names
from ranvier.quantize.ternary import Ternary, token_codes

__all__ = [
    "Awq",
    "Dequantize",
    "Entropy",
    "Float8",
    "Gptq",
    "InputMoments",
    "Integers",
    "MeanSquare",
    "MinMax",
    "Nf4",
    "Observer",
    "Percentile",
    "Quantize",
    "Quantized",
    "Ternary",
    "observer",
    "register_scheme",
    "scheme",
    "scheme_names",
    "token_codes",
]
