"""Recordings to text, and text to speech."""
