"""Evaluation of compressors: perplexity, question answering and Pareto curves."""
