"""A model of Python's own standard library, trained in minutes on two cores."""

from __future__ import annotations
