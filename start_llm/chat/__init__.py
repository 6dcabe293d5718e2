"""One generation, from its messages to its events."""
