"""Interfaces of other libraries on tfla's operator: a program written for one changes its import and nothing else.

Each module is imported on its own and needs torch alone, unless it says otherwise.
"""
