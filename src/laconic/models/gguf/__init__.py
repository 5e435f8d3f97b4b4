"""Read GGUF files, llama.cpp's format of quantised checkpoints, and write them as Hugging Face folders."""
