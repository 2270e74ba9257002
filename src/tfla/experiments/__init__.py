"""Small versions of the paper's training experiments: Figures 8 to 11, Tables 2, 3, 5 and 6.

:mod:`tfla.experiments.plans` has them as data, :mod:`tfla.experiments.run` runs them.
"""
