"""First hop: local rows to a message."""
