"""Images of a request: read within limits, known by their pixels, numbered over the conversation."""
