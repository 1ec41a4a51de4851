# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings for the site; `build_site.py` calls it with the staged pages.

Pages load no files from other hosts: Furo uses the system's fonts, and the search a local index.
"""

from __future__ import annotations

from pathlib import Path

from penstock import __version__

project = "penstock"
release = version = __version__
html_title = f"penstock {__version__}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe"]

# Pages are Markdown that is read in the repository, too.
myst_heading_anchors = 4
myst_links_external_new_tab = False
highlight_language = "none"
suppress_warnings = [
    "myst.header",  # a README.md of the code may start below a first heading
    "misc.highlighting_failure",  # a listing may contain syntax that its lexer does not know
    # Each header reopens the namespace, and Breathe leaves out the `requires` of overloads.
    "duplicate_declaration.cpp",
]

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Docstrings are in Google style. Fields are a list in the text of their class, and not entries of
# the index, which autodoc makes of members that have docstrings.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

breathe_default_project = "penstock"
breathe_default_members = ("members",)
breathe_show_include = False
cpp_maximum_signature_line_length = 80

html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []
