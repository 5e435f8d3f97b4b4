"""Hope: self-modifying Titans with a continuum memory system (arXiv:2512.24695)."""
