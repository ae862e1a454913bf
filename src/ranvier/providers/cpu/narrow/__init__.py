"""Which float32 values of a partition are stored, and which products are made, in 16 bits; see docs/precision.md."""
