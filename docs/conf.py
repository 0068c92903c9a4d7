"""Sphinx settings: MyST pages, API pages from docstrings, warnings are errors (`make docs`)."""

import importlib.metadata

project = "dew"
copyright = "the dew authors"
version = release = importlib.metadata.version("dew")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Docstrings name their shapes in the text; signatures stay readable without the full jaxtyping spelling.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Docstrings write code in single backticks, as Markdown does.
default_role = "code"

html_theme = "furo"
html_title = f"dew {release}"
html_copy_source = False
