"""Speeds of a link below which one setting beats another, from measurements."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from dynamiq_jax._measurement.all_reduce import Measurement
from dynamiq_jax._measurement.settings import BF16_RING, PSUM, parse_setting


def break_even_rate(codec: float, sent: int, other_codec: float, other_sent: int) -> float:
    """Return the link speed, in bits a second, below which one setting beats another.

    It is inf if the setting always beats the other one. On a link of r bits a second a setting
    takes T + 8 B / r, with T its codec time (everything but the wire: the measured time less 8 B /
    link where the devices' own links are known, the measured time where they share a memory) and B
    the bytes that each worker sends. The two are equal at

        r = 8 (B_other - B) / (T - T_other)

    >>> round(break_even_rate(0.03, 10**6, 0.01, 6 * 10**6) / 1e9, 3)
    2.0
    """
    if sent >= other_sent:
        return math.inf if codec < other_codec and sent == other_sent else 0.0
    return 8 * (other_sent - sent) / (codec - other_codec) if codec > other_codec else math.inf


def record(
    result: Measurement, results: Iterable[Measurement], link: float | None, sharing: int
) -> dict[str, Any]:
    """Make a row for tables and the JSON file: a measurement, its codec time, break-even rates.

    Results hold those of the baselines. The link, bits a second, is None where devices share a
    memory, and `sharing` workers share the cores of one machine.
    """
    codec, setting = _codec_seconds(result, link), parse_setting(result.setting)
    others = {parse_setting(each.setting): each for each in results if each.size == result.size}
    baselines = {name: others.get(parse_setting(name)) for name in (PSUM, BF16_RING)}
    break_even = {
        name: break_even_rate(
            codec, result.bytes_per_worker, _codec_seconds(other, link), other.bytes_per_worker
        )
        for name, other in baselines.items()
        if other is not None and parse_setting(name) != setting
    }
    return dataclasses.asdict(result) | {
        # Bytes of the float32 gradient that are reduced in a second ("algorithm bandwidth").
        "bandwidth": 4 * result.size / result.seconds,
        "codec_seconds": codec,
        # `CodecSpeed.ns_per_coordinate`: of a worker that has the machine for itself.
        "codec_ns": 1e9 * codec / (result.size * sharing),
        "break_even": break_even,
    }


def _codec_seconds(result: Measurement, link: float | None) -> float:
    wire = 0.0 if link is None else 8 * result.bytes_per_worker / link
    return max(0.0, result.seconds - wire)
