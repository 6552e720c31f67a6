"""What users write with, and how their Python becomes a program."""
