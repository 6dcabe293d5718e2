"""Shared nouns: messages, requests, events, errors, settings. No I/O, no MLX."""
