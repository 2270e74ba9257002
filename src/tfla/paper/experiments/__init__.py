"""Small versions of the paper's training experiments: Figures 8 to 11, Tables 2, 3, 5 and 6.

:mod:`tfla.paper.experiments.plans` has them as data, :mod:`tfla.paper.experiments.run` runs them.
"""
