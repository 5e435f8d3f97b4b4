"""One module per command, with its flags and its help."""
