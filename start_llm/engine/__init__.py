"""The model thread: the only one that touches MLX arrays."""
