"""Fourier transforms along one axis: by passes over vectors of signals, or as matrix products."""

from ranvier.codegen.llvm.fourier.lower import dft, stft, unsupported

__all__ = ["dft", "stft", "unsupported"]
