"""Slices of TPUs on the network of a data center: links of chips, and what hides under a step."""

from dynamiq_jax._prediction.device_speeds import DeviceKind

# Network cards of a host over its chips: 2 x 100 Gbit/s over 8 (v5e), 4 x 200 Gbit/s over 8 (v6e).
# https://docs.cloud.google.com/tpu/docs/v6e, and /v5p, which has the share of a chip.
LINKS: dict[DeviceKind, str] = {"tpu_v5e": "25gbit", "tpu_v5p": "50gbit", "tpu_v6e": "100gbit"}

# bfloat16 operations a second of a chip, from the same pages.
_PEAKS: dict[DeviceKind, float] = {"tpu_v5e": 197e12, "tpu_v5p": 459e12, "tpu_v6e": 918e12}
UTILIZATION = 0.4  # of the peak, which large models have in practice


def hiding_tokens(
    device: DeviceKind, slices: int, bits_per_second: float, item_bytes: int
) -> float:
    """Return the tokens of a slice in a step from which an exact sum hides under a backward pass.

    Of a dense model with P parameters on C chips, a backward pass over B tokens takes each chip
    4 P B / C operations, and the sum over n slices sends 2 (n - 1) / n P / C elements of it.

    Args:
      device: generation of TPUs.
      slices: number of slices, n.
      bits_per_second: link of a chip.
      item_bytes: bytes of an element.
    """
    sent = 8 * item_bytes * 2 * (slices - 1) / slices
    return sent / bits_per_second * UTILIZATION * _PEAKS[device] / 4
