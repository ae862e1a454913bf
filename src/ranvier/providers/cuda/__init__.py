"""The GPU provider: parts of a graph on NVIDIA GPUs, through torch and generated Triton kernels."""
