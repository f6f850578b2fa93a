"""Bits of groups of leaves from curves of their error."""
