"""Growth of the error of a sum with the number of workers, from the compressions of a topology.

A compression adds an error of a fixed share of the squared norm of what it compresses. A partial
sum of k workers has a squared norm of a k^2 + (1 - a) k times that of one worker, where a, the
agreement, is the share of the energy that all workers have in common. Roundings count as
independent.
"""

from dynamiq_jax.topologies import Topology


def error_growth(topology: Topology, num_workers: int, *, agreement: float = 0.0) -> float:
    """Return the vNMSE of the sum over that of one compression.

    Args:
      topology: topology of the all-reduce.
      num_workers: size of the axis.
      agreement: share of the energy that all workers have in common, 0 to 1.

    Raises:
      ValueError: an agreement that is not a share.

    >>> from dynamiq_jax.topologies import AllToAll, Ring
    >>> round(error_growth(Ring(), 64)), round(error_growth(AllToAll(), 64))
    (32, 2)
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement={agreement!r} is not a share. Give 0 to 1.")

    def energy(workers: int) -> float:
        return agreement * workers**2 + (1 - agreement) * workers

    compressed = topology.compressions(num_workers)
    return sum(count * energy(k) for count, k in compressed) / energy(num_workers)
