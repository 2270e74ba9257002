"""Benchmarks: each suite times this library, its roofline and baselines in one run, in turn."""
