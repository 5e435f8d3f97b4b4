"""Audit of latent thoughts: whether the answers of a run depend on them."""
