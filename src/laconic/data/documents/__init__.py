"""Documents: loading, tokenization, segmentation and batching."""
