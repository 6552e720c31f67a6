"""Times AttentionEngine beside its peers; numbers are checked before time counts."""
