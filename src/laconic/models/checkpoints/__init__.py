"""Checkpoints on disk: configurations, weights, names of models."""
