"""Kernels that ship: which attentions they are of, the wheel that holds them, and what is installed of such wheels."""
