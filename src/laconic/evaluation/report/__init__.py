"""HTML reports, plots and the figures reported by papers."""
