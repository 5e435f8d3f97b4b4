"""Compressed memories of documents against plain baselines, at equal positions and at equal bytes."""
