"""Llama-family decoder, KV cache, weights and Hugging Face configuration."""
