"""Plumbing of the command line: options, units, tables, plots, records, signals, pipes."""
