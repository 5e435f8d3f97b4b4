"""The command line: flags and printing."""
