"""Training with trainers that others wrote, exact and through the library."""
