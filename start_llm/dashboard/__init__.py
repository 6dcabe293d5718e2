"""Read-only: metrics, request logs, live lines. Sees `core` only."""
