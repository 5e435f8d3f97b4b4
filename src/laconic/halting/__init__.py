"""Learned numbers of vectors: distributions of lengths, and gradient estimators that train them."""
