"""Random programs of several collectives on real processes, which pause, are killed and restart."""
