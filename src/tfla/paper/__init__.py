"""The paper's figures, tables and claims, from formulas, this library's operator and stored results.

:mod:`tfla.paper.sections` lists the sections of `tfla analyze`, :mod:`tfla.paper.report_types` has what they return,
and :mod:`tfla.paper.experiments` trains the models of the paper in small.
"""
