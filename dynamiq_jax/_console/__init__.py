"""Plumbing of the command line: options, units, tables, records, pipes."""
