"""The verbs of the command line: their flags, and what each prints and writes."""
