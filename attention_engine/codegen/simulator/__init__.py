"""Threads of a block that part: roles, barriers, asynchronous copies and products, and the lanes of a warp."""
