"""Synthetic tasks drawn on demand."""
