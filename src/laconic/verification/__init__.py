"""Stage-by-stage comparison of a decoder with a reference implementation (`laconic verify parity`)."""
