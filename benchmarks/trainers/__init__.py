"""Training with third-party trainers, exact and through the library."""
