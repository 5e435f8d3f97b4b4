"""Recipes of tiny runs; importing this has no side effects, so that benchmarks can use them too."""

TINY_RECIPE = """method = "kava"
[model]
family = "llama"
tokenizer = "digits"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[latents]
num_latents = 2
jacobi_iterations = 1
[data]
source = "digits"
format = "digits"
chain_steps = "all"
digits = { num_operations = 2, train_rows = 200, valid_rows = 20 }
[validation]
max_rows = 4
max_tokens = 6
[train]
steps = 4
batch_size = 8
save_every = 2
"""

TINY_DOCUMENT_RECIPE = """method = "lm"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[compression]
max_vectors = 2
[cms]
chunk_sizes = [8]
[data]
source = "text"
path = "books.jsonl"
[data.text]
row_tokens = 48
segment_tokens = 16
segment_lengths = "fixed"
[train]
steps = 1
batch_size = 2
"""
