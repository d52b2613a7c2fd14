"""Benchmarks; every ratio is to a named rival in the same run."""
