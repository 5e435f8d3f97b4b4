"""Evaluation of trained runs: metrics, statistics, results store and reports."""
