"""TileLang kernels, one algorithm a file, into which a program's expressions are spliced."""
