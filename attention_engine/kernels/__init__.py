"""TileLang kernels, one algorithm a file, into which a program's expressions are spliced."""

from attention_engine import folders

folders.prepare_tilelang()  # it makes its folder when it is imported
