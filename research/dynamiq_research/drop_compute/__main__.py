"""Run the prediction of DropCompute as `python -m dynamiq_research.drop_compute`."""

from typing import Any

from dynamiq_jax._console import program


def _command() -> Any:
    from dynamiq_research.drop_compute.command import Predict

    return Predict


if __name__ == "__main__":
    program.run("python -m dynamiq_research.drop_compute", _command)
