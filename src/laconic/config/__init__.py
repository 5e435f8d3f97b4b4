"""Recipe schema and recipe loading; imports no torch."""
