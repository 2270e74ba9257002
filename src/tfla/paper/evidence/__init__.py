"""Experiments that show what models with each mixer can do: recall, state tracking, longer text, needles.

A task (:mod:`tfla.paper.evidence.recall` and those beside it) makes the sequences and measures a model on them,
:mod:`tfla.paper.evidence.plans` lists the runs, and :mod:`tfla.paper.evidence.run` trains them.
"""
