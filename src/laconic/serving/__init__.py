"""`laconic serve`: an OpenAI-compatible server for checkpoints and runs, with continuous batching."""
