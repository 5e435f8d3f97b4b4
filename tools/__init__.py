"""Developer tools; run from the root of a checkout."""
