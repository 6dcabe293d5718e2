"""Anthropic's messages: bodies to requests, events to answers."""
