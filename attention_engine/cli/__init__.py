"""The command line: python -m attention_engine COMMAND."""
