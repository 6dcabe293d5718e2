"""Generated text to reasoning, visible text and tool calls."""
