"""The `laconic` command line: flags and printing; one module a command."""
