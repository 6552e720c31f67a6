"""Other libraries that engines plug into, one a file; each is imported only by those who have it."""
