"""What the Hopper kernel over keys is made of."""
