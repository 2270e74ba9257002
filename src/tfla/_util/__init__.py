"""Helpers without a subject of their own: files, errors of the command line, devices, caching."""
