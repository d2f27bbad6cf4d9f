"""Training: text to tokens, the loop, its checkpoints and its record."""
