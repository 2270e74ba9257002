"""The earlier name of :mod:`tfla.paper.experiments`, which can be imported for one more release."""

import sys
import warnings

import tfla.paper.experiments

warnings.warn("tfla.experiments is now tfla.paper.experiments", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = tfla.paper.experiments
