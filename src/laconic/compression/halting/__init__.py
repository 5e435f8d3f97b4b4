"""Learned number of summary vectors: stop distribution, gradient estimators and losses."""
