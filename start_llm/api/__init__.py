"""The HTTP edge and its dialects: bodies in, `core` requests on; `core` events in, bodies out. No MLX."""
