"""A test accelerator: a process with memory, speed, latency and faults of its own choosing."""
