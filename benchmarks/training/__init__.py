"""Models that are trained: time to accuracy, final loss, train steps around the collectives."""
