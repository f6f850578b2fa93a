"""The line that names the backend of the codec, which several commands print."""

from rich.console import Console

from pallas_kernels import operations


def print_default(console: Console) -> None:
    """Print which backend runs the codec on this machine, and the reasons against others."""
    line = f"By default, {operations.default_backend()}."
    console.print(line, highlight=False, markup=False, soft_wrap=True)
