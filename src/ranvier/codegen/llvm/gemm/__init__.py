"""Matrix multiplication of float32 and float64: micro-kernels as data, packing, and the drivers that block the work."""
