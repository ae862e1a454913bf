"""Layers as modules."""
