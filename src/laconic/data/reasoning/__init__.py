"""Questions with chains of thought and answers: loading, encoding, batching, answer matching."""
