"""Ollama's API: its bodies, its answers, its streams of JSON lines."""
