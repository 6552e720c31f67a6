"""Passes over programs, one a file: each takes a valid program and returns a valid one."""
