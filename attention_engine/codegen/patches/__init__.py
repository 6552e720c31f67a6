"""Changes to TileLang 0.1.15: each says what is wrong with it, and what that costs."""
