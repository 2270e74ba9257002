"""The paper's analyses: figures with their numbers, each from formulas, this library's own operator or stored results.

:mod:`tfla.paper.subjects` lists the subjects, :mod:`tfla.paper.frame` says what one is made of.
"""
