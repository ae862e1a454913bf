"""Parts of a graph through mlx: Metal on Apple machines, and wherever else the package runs."""
