"""Generators of reasoning data sets, written as JSONL."""
