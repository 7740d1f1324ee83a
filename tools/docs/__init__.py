"""The documentation site: mkdocs' hooks, and how docstrings become reference pages."""
