"""Commands, ends and ranks that show no tables do not import what draws them."""

from __future__ import annotations

import subprocess
import sys


def test_a_command_without_tables_does_not_import_what_draws_them() -> None:
    script = (
        "import sys\nfrom crossrail_tools.cli import main\n"
        "print(main(['store', '--help']))\nprint('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["0", "False"]


def test_ends_and_ranks_do_not_import_what_draws_tables() -> None:
    modules = ", ".join(
        f"crossrail_tools.cli.{name}"
        for name in ("point_to_point", "mesh", "control", "ep.host", "ep.elastic", "ep.cuda")
    )
    script = f"import sys\nimport {modules}\nprint('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
