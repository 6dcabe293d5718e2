"""The life of a server as a service: one per user and port, started, watched, joined, asked, stopped."""
