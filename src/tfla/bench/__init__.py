"""Measuring: each suite in one run, interleaved with the floor and the peers it is compared with."""
