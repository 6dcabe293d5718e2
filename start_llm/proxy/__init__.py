"""The LiteLLM proxy: its configuration, and its life as a child process."""
