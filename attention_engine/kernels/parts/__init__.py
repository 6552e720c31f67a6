"""Kernels that take what attention to parts of rows left."""
