"""Kernels of linear attention with a decay for each channel."""
