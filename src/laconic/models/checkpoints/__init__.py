"""Checkpoints on disk: configurations, weights, names of models, KV cache files."""
