"""What a call launches, as data: buffers, launches, and the order of launches."""
