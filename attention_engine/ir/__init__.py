"""The intermediate representation: expressions, programs, and what can be said of them without torch or TileLang."""
