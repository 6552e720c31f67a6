"""What a tile program is made of, on a CPU: scalars, buffers, windows into them, and operations on tiles."""
