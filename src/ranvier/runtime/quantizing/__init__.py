"""Models in fewer bits: samples, layers, rewriting, report."""

from __future__ import annotations

from ranvier.runtime.quantizing.maker import prepared
from ranvier.runtime.quantizing.options import Quantization
from ranvier.runtime.quantizing.quantizer import NotWorthIt, Quantizer
from ranvier.runtime.quantizing.report import Difference, LayerReport, QuantizationReport
from ranvier.runtime.quantizing.samples import feeds_of, read_samples

__all__ = [
    "Difference",
    "LayerReport",
    "NotWorthIt",
    "Quantization",
    "QuantizationReport",
    "Quantizer",
    "feeds_of",
    "prepared",
    "read_samples",
]
