"""Tensor operations of the hot path."""
