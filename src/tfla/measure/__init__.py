"""The measurement of one call: its inputs, seconds and peak memory, the machine's rates, and a roofline bound.

:mod:`tfla.tune` measures candidates with it, :mod:`tfla.bench` the suites of the paper.
"""
