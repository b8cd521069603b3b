"""Sphinx's configuration of the documentation site: `make site`.

The sources are the pages of the repository as they are, so the source folder is its root. The reference of Python is
read from the installed package: a page has the text of `help()`. Types of the native module are those of its stub.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "python")]

import signatures  # noqa: E402
from links import Links  # noqa: E402

import crossrail  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]

project = "Crossrail"
author = "the Crossrail developers"
project_copyright = "the Crossrail developers, Apache-2.0"
version = release = crossrail.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**.md", "fuzz/README.md", "packages/*/README.md", "examples/**.md", "LICENSE"]
exclude_patterns = [".*", "target", "shared", "dist", "docs/README.md"]

# Docstrings: NumPy's sections, and a single backtick for a name of this library.
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
# Indented blocks are commands, not Python.
highlight_language = "text"

html_theme = "furo"
html_title = f"Crossrail {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers this file's own handlers."""
    app.connect("source-read", Links(ROOT).rewrite)
    app.connect("autodoc-process-signature", signatures.of_the_stub)
    app.connect("autodoc-skip-member", signatures.skip)
    app.connect("missing-reference", signatures.elsewhere)
    return {"parallel_read_safe": True}
