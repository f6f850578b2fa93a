"""Predicted times of a step on a link, and of the rounds of islands."""
