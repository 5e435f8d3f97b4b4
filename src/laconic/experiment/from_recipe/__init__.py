"""From a recipe to its model, method and data, and to an estimate of its cost."""
