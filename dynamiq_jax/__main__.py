"""Run the command `dynamiq-jax` as `python -m dynamiq_jax`."""

from dynamiq_jax._commands import main

if __name__ == "__main__":
    main()
