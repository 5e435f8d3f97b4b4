"""The HTTP side of `laconic serve`: routes, limits, memories and sessions in front of the engine."""
