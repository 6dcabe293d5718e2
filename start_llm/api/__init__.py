"""The HTTP edge: bytes to requests, events to bytes. Dialects only translate."""
