"""Random programs of several collectives on real processes, some of which pause."""
