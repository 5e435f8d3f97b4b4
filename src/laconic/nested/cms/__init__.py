"""Continuum memory system: MLP levels updated at different frequencies (arXiv:2512.24695)."""
