"""`python -m crossrail` is the command `crossrail`."""

import sys

from crossrail.cli import main

if __name__ == "__main__":
    sys.exit(main())
