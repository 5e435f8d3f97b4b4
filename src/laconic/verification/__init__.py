"""Stage-by-stage parity of the decoder with reference implementations."""
