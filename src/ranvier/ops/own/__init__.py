"""Operators of this runtime itself, in the domain ``ranvier``."""
