"""Checks of prose, links, commands, tables and code of pages: `make lint-docs` runs them."""
