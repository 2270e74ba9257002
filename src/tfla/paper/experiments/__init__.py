"""The paper's training experiments in small versions: Figures 8 to 11, Tables 2, 3, 5 and 6.

:mod:`tfla.paper.experiments.plans` lists them, :mod:`tfla.paper.experiments.run` runs them.
"""
