"""Reuse of stored KV: where it is found, how it is cut, what is kept. Everything here runs on the model thread."""
