"""Joins processes through `jax.distributed`, with time-outs after which nobody waits any more.

A process that dies closes its connections, and gloo raises in those that talk to it, at once. One
that hangs, or whose link stalls, misses heartbeats; then JAX aborts all processes (SIGABRT), also
those inside a collective, which has no time-out of its own.
"""

import jax

START_TIMEOUT = 300  # seconds until all processes have to be there
HEARTBEAT_TIMEOUT = 30  # seconds without a sign of life: the others end
SHUTDOWN_TIMEOUT = 10  # seconds that a process which ends waits for the others


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins; None has `jax.distributed` find out under Slurm, MPI or Kubernetes.

    JAX aborts this process (SIGABRT) if the others have not come after `START_TIMEOUT`.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: how many there are.
      process_id: which of them this is.

    Raises:
      ValueError, RuntimeError: arguments are missing, or JAX has computed something before.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=START_TIMEOUT,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
    )
