"""Speeds by the kind of device: of the codec, of exact sums, and of links."""

from typing import Literal

from dynamiq_jax._prediction.cost_model import CodecSpeed

DeviceKind = Literal["gpu", "cpu", "tpu_v5e", "tpu_v5p", "tpu_v6e"]

# DynamiQ at 5 bits from float32. CPU: the native codec on two cores, all that a worker of a ring of
# 4 computes in new memory, benchmarks/speed/native.py. GPU: an H200, for a worker of a ring of 8,
# benchmarks/gpu/kernels.py; the time of a step is a guess.
# TPU: about the cycles that the compiler schedules, benchmarks/aot/tpu.py, for 8 chips and for two
# slices; not measured yet.
CODEC_SPEEDS: dict[DeviceKind, CodecSpeed] = {
    "cpu": CodecSpeed(ns_per_coordinate=2.6, us_per_step=500.0),
    "gpu": CodecSpeed(ns_per_coordinate=0.0055, us_per_step=10.0),
    "tpu_v5e": CodecSpeed(ns_per_coordinate=0.048, us_per_step=12.0, ns_of_order=0.0091),
    "tpu_v5p": CodecSpeed(ns_per_coordinate=0.044, us_per_step=8.0, ns_of_order=0.0099),
    "tpu_v6e": CodecSpeed(ns_per_coordinate=0.036, us_per_step=8.8, ns_of_order=0.0101),
}
# The sum of an exact all-reduce: 12 bytes of memory a coordinate, of 819, 2765 and 1638 GB/s on
# the TPUs.
SUM_SPEEDS: dict[DeviceKind, CodecSpeed] = {
    "cpu": CodecSpeed(ns_per_coordinate=0.5, us_per_step=100.0),
    "gpu": CodecSpeed(ns_per_coordinate=0.003, us_per_step=5.0),
    "tpu_v5e": CodecSpeed(ns_per_coordinate=0.015, us_per_step=5.0),
    "tpu_v5p": CodecSpeed(ns_per_coordinate=0.0043, us_per_step=5.0),
    "tpu_v6e": CodecSpeed(ns_per_coordinate=0.0073, us_per_step=5.0),
}

# GPUs of one host with PCIe and no NVLink. The slowest hop of a ring, in each direction while both
# carry: a GPU sends and receives at once. Without peer access, such as between GeForce cards, a
# transfer goes through the host's memory. Public reports, not measurements of this project:
# - pcie4: 19 to 21 GB/s in both directions together between two of eight A40 without peer access,
#   https://github.com/NVIDIA/nccl-tests/issues/74
# - pcie5: all_reduce_perf of NCCL on eight RTX 5090, 28 GB/s of bus bandwidth,
#   https://github.com/NVIDIA/nccl/issues/1639
PCIE_LINKS = {"pcie4": "80gbit", "pcie5": "224gbit"}
# An A10 has an eighth of the memory bandwidth of an H200, whose codec was timed.
PCIE_CODEC_NS = 8 * CODEC_SPEEDS["gpu"].ns_per_coordinate

# A chip's share of the network cards of its host, to other slices: 2 x 100 Gbit/s over 8 (v5e),
# 4 x 200 Gbit/s over 8 (v6e). https://docs.cloud.google.com/tpu/docs/v6e, and /v5p, which has it.
TPU_LINKS: dict[DeviceKind, str] = {"tpu_v5e": "25gbit", "tpu_v5p": "50gbit", "tpu_v6e": "100gbit"}
# bfloat16 operations a second of a chip, from the same pages.
_TPU_PEAKS: dict[DeviceKind, float] = {"tpu_v5e": 197e12, "tpu_v5p": 459e12, "tpu_v6e": 918e12}
# Names that JAX has for these chips; others have the speeds of a v5e.
_TPU_KINDS: dict[str, DeviceKind] = {
    "TPU v5": "tpu_v5p",
    "TPU v5p": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e",
    "TPU v6e": "tpu_v6e",
}
UTILIZATION = 0.4  # of the peak, which large models have in practice


def kind_of(platform: str, device_kind: str) -> DeviceKind:
    """Return the kind of a device, from the names that JAX has for its platform and its model."""
    if platform == "tpu":
        return _TPU_KINDS.get(device_kind, "tpu_v5e")
    return "cpu" if platform == "cpu" else "gpu"


def hiding_tokens(
    device: DeviceKind, slices: int, bits_per_second: float, item_bytes: int
) -> float:
    """Return the tokens of a slice in a step from which an exact sum hides under a backward pass.

    Of a dense model with P parameters on C chips, a backward pass over B tokens takes each chip
    4 P B / C operations, and the sum over n slices sends 2 (n - 1) / n P / C elements of it.
    """
    sent = 8 * item_bytes * 2 * (slices - 1) / slices
    return sent / bits_per_second * UTILIZATION * _TPU_PEAKS[device] / 4
