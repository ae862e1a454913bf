"""Ternary models: the CPU provider's machine code, and the policy of what counts as ternary."""
