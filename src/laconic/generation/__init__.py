"""Text generation: decode loop, sampling, static-cache decoding and text streaming."""
