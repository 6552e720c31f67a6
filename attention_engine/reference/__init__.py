"""The meaning of a program on torch tensors, dense: what kernels are compared with. Needs the IR alone."""
