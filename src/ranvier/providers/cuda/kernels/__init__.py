"""Hand-written Triton kernels: what a printer of loops cannot find by itself.

Every function works on torch tensors it is given, results and workspaces included, and neither allocates then nor waits
for the device: all of them can stand in a captured CUDA graph. Lengths and positions that change from one replay to the
next are read from device memory. Modules import torch and triton when they are imported, so nothing above imports them
before a device is used.
"""
