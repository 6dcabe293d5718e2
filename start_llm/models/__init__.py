"""What is loaded: models, what they can do, the machine they run on."""
