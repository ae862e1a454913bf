"""The loop IR printed as Triton, and matrix products with epilogues of the same IR, for one GPU.

Printing needs neither triton nor torch; :mod:`ranvier.codegen.triton.library` brings them in when something is
launched. With ``TRITON_INTERPRET=1`` everything runs on a machine without a GPU.
"""
