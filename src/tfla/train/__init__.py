"""Training of language models on text: ``tfla train``, ``tfla generate``, ``tfla demo``.

Needs the extra ``train``: ``pip install "tfla[train]"``.
"""
