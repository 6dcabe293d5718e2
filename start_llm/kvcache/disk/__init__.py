"""Stored KV in files."""
