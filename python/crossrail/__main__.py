"""`python -m crossrail` is the command `crossrail`, which the package `crossrail_tools` has."""

import sys

if __name__ == "__main__":
    from crossrail_tools.cli import main

    sys.exit(main())
