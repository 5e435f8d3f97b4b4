"""Evaluation of models that learn while they read."""
