"""Attention kernels in straight lines, for any GPU: each thread of a block does the same."""
