"""From recipe to model, data and run; loading of runs and checkpoints."""
