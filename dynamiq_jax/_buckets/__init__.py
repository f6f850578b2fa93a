"""Buckets of leaves, the axes that they cross, and the order in which they are sent."""
