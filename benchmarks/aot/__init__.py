"""Sections of `aot_h200.py`."""
