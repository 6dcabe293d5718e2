"""OpenAI's chat completions, completions and Responses: bodies to requests, events to answers."""
