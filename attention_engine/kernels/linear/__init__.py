"""TileLang kernels of linear attention: chunks of tokens that meet pair by pair, states between them."""
