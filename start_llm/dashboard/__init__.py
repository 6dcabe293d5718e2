"""Read-only: metrics, request logs, lines on the terminal. Sees `core` only."""
