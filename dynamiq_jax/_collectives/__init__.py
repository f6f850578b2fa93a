"""The collectives: layout of leaves, and transfer of one bucket."""
