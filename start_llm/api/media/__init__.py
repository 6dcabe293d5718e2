"""Embeddings and audio: routes beside chat."""
