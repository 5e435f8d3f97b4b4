"""Evaluation: answers judged, figures with intervals, pages; it knows no method."""
