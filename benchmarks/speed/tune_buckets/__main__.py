"""Bucket size with the shortest training step, measured on a step of a user.

python -m benchmarks.speed.tune_buckets examples.tune_buckets:make_step
"""

from typing import Any

from dynamiq_jax._console import program


def _command() -> Any:
    from benchmarks.speed.tune_buckets.command import TuneBuckets

    return TuneBuckets


if __name__ == "__main__":
    program.run("python -m benchmarks.speed.tune_buckets", _command)
