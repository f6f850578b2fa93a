"""Speed of the codec and of exact sums, by the kind of device."""

from typing import Literal, get_args

from dynamiq_jax._prediction.cost_model import CodecSpeed

DeviceKind = Literal["gpu", "cpu", "tpu_v5e", "tpu_v5p", "tpu_v6e"]
DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

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
