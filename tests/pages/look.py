"""Pictures of pages at every width, light and dark, to be looked at.

python tests/pages/look.py FOLDER [PAGE.html ...]    the committed pages, or others
"""

from __future__ import annotations

import sys
from pathlib import Path

from browser import NAMES, Browser, found

REPORTS = Path(__file__).parents[2] / "docs" / "reports"


def main() -> int:
    """Writes the pictures."""
    program = found()
    if len(sys.argv) < 2 or program is None:
        why = (
            "usage: look.py FOLDER [PAGE.html ...]"
            if program
            else f"no browser: none of {', '.join(NAMES)} is installed"
        )
        print(why, file=sys.stderr)
        return 2
    with Browser(program) as browser:
        for page in [Path(one) for one in sys.argv[2:]] or sorted(REPORTS.glob("*.html")):
            for width in (400, 800, 1600):
                for dark in (False, True):
                    browser.show(page, width, dark=dark)
                    browser.screenshot(Path(sys.argv[1]) / f"{page.stem}-{width}{'-dark' if dark else ''}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
