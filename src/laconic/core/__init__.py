"""The ground: a Llama-family decoder, its cache as a value, generation, and every artifact on disk."""
