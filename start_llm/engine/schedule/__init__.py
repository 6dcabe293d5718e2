"""Which work the model thread does next."""
