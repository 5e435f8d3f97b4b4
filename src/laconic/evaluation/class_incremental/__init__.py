"""Class-incremental learning: protocol, learners, baselines and metrics."""
