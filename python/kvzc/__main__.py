"""``python -m kvzc`` is the command ``kvzc``."""

import sys

from kvzc.cli import main

if __name__ == "__main__":
    sys.exit(main())
