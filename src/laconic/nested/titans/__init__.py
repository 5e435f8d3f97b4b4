"""Titans: neural long-term memory (arXiv:2501.00663)."""
