"""Messages to tokens: heal, canonical forms, what the model is shown, rendering, exact tokens. No MLX."""
