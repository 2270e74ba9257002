"""The earlier name of :mod:`tfla.paper`, which can be imported for one more release."""

import sys
import warnings

import tfla.paper

warnings.warn("tfla.analysis is now tfla.paper", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = tfla.paper
