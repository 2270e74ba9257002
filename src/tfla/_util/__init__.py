"""Helpers that every layer of the library may import: files, errors, options, devices, caches, Markdown."""
