"""Kernels that read keys and values from a cache: parts of a row, and what joins them."""
