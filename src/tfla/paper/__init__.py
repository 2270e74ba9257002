"""The paper's analyses: figures with their numbers, each from formulas, this library's own operator or stored results.

:mod:`tfla.paper.sections` lists the sections, :mod:`tfla.paper.report_types` says what one is made of.
"""
