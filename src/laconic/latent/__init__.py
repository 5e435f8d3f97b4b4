"""Latent reasoning: KaVa, PCCoT, CODI, Coconut, iCoT, and chain-of-thought baselines."""
