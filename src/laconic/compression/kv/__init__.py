"""Memories of keys and values: selection by score, and trained cartridges."""
