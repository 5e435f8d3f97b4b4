"""Training loop, checkpoints and distributed ranks."""
