"""Optimizers of nested learning: DGD and M3 (arXiv:2512.24695)."""
