"""Checks of prose, links, commands and tables: `make lint-docs` runs them."""
