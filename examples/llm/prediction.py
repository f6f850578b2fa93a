"""Predicted times of a step on slower links, from the cost model of `dynamiq-jax advise`."""

import dynamiq_jax as dq
from dynamiq_jax._console.units import format_rate, parse_rate
from dynamiq_jax._prediction.cost_model import Network, predict, predict_exact
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS, SUM_SPEEDS, DeviceKind
from examples.llm.recipe import Recipe

# Of each worker. Accelerators wait for links that CPUs do not notice.
_LINKS = {"cpu": ("100mbit", "1gbit", "10gbit")}
_LINKS_OF_ACCELERATORS = ("10gbit", "100gbit", "400gbit")


def predicted_seconds(
    recipe: Recipe, *, size: int, workers: int, computing: float, device: DeviceKind
) -> dict[str, float]:
    """Predict the seconds of a step, in which nothing hides under computing.

    Args:
      recipe: recipe with one method for all leaves.
      size: coordinates of the gradient of each worker.
      workers: number of workers.
      computing: seconds of a step without the all-reduce.
      device: kind of the devices.

    Returns:
      Seconds by the speed of the link of each worker, such as "1 Gbit/s".
    """
    seconds = {}
    for link in _LINKS.get(device, _LINKS_OF_ACCELERATORS):
        rate = parse_rate(link)
        network = Network(gbit_per_s=rate / 1e9)
        if recipe.is_exact:
            codec = SUM_SPEEDS[device]
            all_reduce = predict_exact(size, workers, network=network, codec=codec)
        else:
            assert isinstance(recipe.method, str)
            topology = dq.topologies.resolve_topology(recipe.topology)
            axis = dq.methods.Axis("data", workers)
            call = dq.methods.Call(size=size, axis=axis, topology=topology)
            cost = dq.methods.resolve_method(recipe.method).wire_cost(call)
            all_reduce = predict(size, workers, topology, cost, network, CODEC_SPEEDS[device])
        seconds[format_rate(rate)] = computing + all_reduce.total
    return seconds
