"""Arithmetic, shape and data movement of tensors."""
