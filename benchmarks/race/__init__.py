"""Training over slow links against the clock: the parts of time_to_accuracy.py."""
