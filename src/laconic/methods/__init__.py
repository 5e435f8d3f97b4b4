"""Methods: one paper each, its equations as functions in its order and letters."""
