"""The command line: what may be typed, what is refused at once, what runs."""
