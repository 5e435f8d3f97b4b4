"""Tensor operations of the decoder: attention back ends, linear layers, activation functions, scaling of RoPE."""
