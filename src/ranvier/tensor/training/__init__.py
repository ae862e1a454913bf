"""Training: data in a reproducible order, a loop, checkpoints that a kill cannot hurt, and loaded models that learn."""
