"""Text in and out: tokenizers now, data sets as they come."""
