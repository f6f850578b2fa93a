"""`python -m dynamiq_jax.cli`: the command where no entry point is installed."""

from dynamiq_jax.cli import main

if __name__ == "__main__":
    main()
