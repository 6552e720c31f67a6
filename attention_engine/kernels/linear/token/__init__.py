"""Linear attention whose decay is one number for each token and head."""
