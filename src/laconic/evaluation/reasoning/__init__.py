"""Accuracy of reasoning runs on question sets."""
