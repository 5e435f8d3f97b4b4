"""Training: one loop, run directories, checkpoints, ranks; it knows no method."""
