"""Recipes: typed tables of settings, and how they are loaded."""
