"""What users write with, and how their Python becomes a program."""

from attention_engine.frontend import functions  # noqa: F401 - fills the table that symbols look into
