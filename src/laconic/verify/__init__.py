"""The checks: a model against a reference stage by stage, and the papers against the code."""
