"""`launch AGENT`: runs an installed coding agent against this server, with a configuration of its own."""
