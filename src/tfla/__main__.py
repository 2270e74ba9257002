"""``python -m tfla`` is the command ``tfla``."""

import sys

from tfla.cli import main

if __name__ == "__main__":
    sys.exit(main())
