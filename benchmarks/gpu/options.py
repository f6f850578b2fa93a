"""Options of the benchmark."""

import dataclasses

from dynamiq_jax.methods import DynamiQ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and for how long; the tiny sizes of `--small` prove the script, not the
    kernels.
    """

    sizes: tuple[int, ...]  # coordinates; the first is the one that matters most
    bits: tuple[float, ...]  # the first is the one that matters most
    bits_of_sizes: tuple[float, ...]  # of all sizes but the first
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]  # of codes
    sweep_rows: tuple[int, ...]
    sweep_warps: tuple[int, ...]
    check_bits: tuple[float, ...]
    check_size: int
    workers: int
    worker_size: int  # coordinates of each simulated worker
    copy_bytes: int
    batches: int
    batch_seconds: float
    warm_seconds: float
    minutes: float
    instructions_per_coordinate: float
    clock_mhz: float | None
    interpret: bool
    output: str | None

    def method(self, bits: float, implementation: str | None = None) -> DynamiQ:
        """The method that is measured."""
        return DynamiQ(bits=bits, widths=self.widths, implementation=implementation)
