"""Learned number of summary vectors: the rules of inference and the losses."""
