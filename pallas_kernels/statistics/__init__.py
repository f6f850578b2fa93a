"""Norm and mean of every super-group in one read of the gradient."""
