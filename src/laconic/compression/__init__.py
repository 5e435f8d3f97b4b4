"""Context compression: AutoCompressors, summary vectors and memory files."""
