"""Attention kernels placed by hand for Hopper: a warp copies ahead, products run while others compute."""
