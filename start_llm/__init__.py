"""A local, KV-cache-aware LLM server for coding agents, on MLX."""

__version__ = "0.1.0"
