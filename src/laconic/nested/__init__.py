"""Nested learning: fast weights at several time scales (CMS, Hope, Titans) and its optimizers."""
