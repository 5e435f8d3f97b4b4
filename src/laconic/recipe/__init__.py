"""A recipe file becomes a decoder, a method, its data and a run: the one room that knows everyone."""
