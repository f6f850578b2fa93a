"""Links of GPUs of one host that has PCIe and no NVLink."""

from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS

# The slowest hop of a ring, in each direction while both carry: a GPU sends and receives at once.
# Without peer access, such as between GeForce cards, a transfer goes through the host's memory.
# Public reports, not measurements of this project:
# - pcie4: 19 to 21 GB/s in both directions together between two of eight A40 without peer access,
#   https://github.com/NVIDIA/nccl-tests/issues/74
# - pcie5: all_reduce_perf of NCCL on eight RTX 5090, 28 GB/s of bus bandwidth,
#   https://github.com/NVIDIA/nccl/issues/1639
HOST_LINKS = {"pcie4": "80gbit", "pcie5": "224gbit"}

# An A10 has an eighth of the memory bandwidth of an H200, whose codec was timed.
CODEC_NS = 8 * CODEC_SPEEDS["gpu"].ns_per_coordinate
