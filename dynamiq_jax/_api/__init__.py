"""Functions that users call, each in the file of its name."""
