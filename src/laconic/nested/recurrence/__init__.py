"""Chunk-wise recurrences of matrix and MLP memories."""
