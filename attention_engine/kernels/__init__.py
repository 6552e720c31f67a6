"""TileLang kernels, one algorithm a file, into which a program's expressions are spliced."""

from attention_engine.kernels import remembered

remembered.install()
