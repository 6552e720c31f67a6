"""Runs kernels: TileLang's compiler for a GPU, the interpreter on a CPU."""
