"""Reference implementations that only tests use."""
