"""Inspection of latent thoughts: logit lens, KV selection and interventions."""
