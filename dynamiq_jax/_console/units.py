"""Sizes and rates as people write them: 8Mi coordinates, 200mbit a second."""

import re
from decimal import Decimal

from dynamiq_jax._console.errors import CommandError

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SIZES |= {"k": 10**3, "B": 10**9}  # as models are called: 7B
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # as tc spells them
_LARGEST = 10**18  # above all gradients and links, and times can still be computed from it
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([A-Za-z]*)")


def parse_size(text: str, option: str = "--sizes", least: int = 1) -> int:
    """Parse a number of coordinates: "8Mi", "1.5M", "7B" or "4096"."""
    example = "8Mi (8 * 2**20), 350M (350 * 10**6), 7G or 7B (7 * 10**9), or 4096"
    size = _parse(text, _SIZES, option, "a number of coordinates", example)
    if size != int(size):
        raise CommandError(
            f"{option}: {text!r:.80} is not a whole number. Give one such as {example}."
        )
    if size < least:
        raise CommandError(
            f"{option}: {text!r:.80} is less than {least}, and so few coordinates are not "
            f"compressed. Give more, such as {example}."
        )
    return int(size)


def parse_rate(text: str, option: str = "--rate") -> float:
    """Parse a rate, such as "200mbit" or "1gbit", to bits a second."""
    spelled = (str.lower, str.capitalize, str.upper)
    rates = {spell(unit): factor for unit, factor in _RATES.items() for spell in spelled}
    return float(_parse(text, rates, option, "a rate", "200mbit, 1gbit or 2.5gbit"))


def parse_bytes(text: str, option: str) -> int:
    """Parse a number of bytes: "4Ki", "4kB", "1.5 MB" or "4096"."""
    sizes = {unit: factor for unit, factor in _SIZES.items() if unit != "B"}
    sizes |= {f"{unit}B": factor for unit, factor in sizes.items()}
    return int(_parse(text, sizes, option, "a number of bytes", "4Ki, 4kB or 4096"))


def format_size(size: int) -> str:
    """Format a number of coordinates in the shortest way.

    >>> format_size(8 * 2**20), format_size(5000)
    ('8Mi', '5000')
    """
    for unit in ("Gi", "Mi", "Ki"):
        if size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return str(size)


def format_rate(bits_per_second: float) -> str:
    """Format a rate in its natural unit.

    >>> format_rate(200e6), format_rate(1.25e9), format_rate(3.6e12)
    ('200 Mbit/s', '1.25 Gbit/s', '3600 Gbit/s')
    """
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_second >= factor:
            digits = max(3, len(f"{bits_per_second / factor:.0f}"))
            return f"{bits_per_second / factor:.{digits}g} {unit}"
    return f"{bits_per_second:.3g} bit/s"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits.

    >>> format_seconds(0.0314), format_seconds(0.9996), format_seconds(9150)
    ('31.4 ms', '1 s', '9150 s')
    """
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:  # which three digits round to 1
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _parse(text: str, units: dict[str, int], option: str, what: str, example: str) -> Decimal:
    match = _NUMBER.fullmatch(text.strip())
    # Decimal: 16.1 * 1000 is not whole in binary floating point.
    number = Decimal(match[1] if match else 0)
    if match is None or match[2] not in units or number <= 0:
        raise CommandError(f"{option}: {text!r:.80} is not {what}. Give one such as {example}.")
    if number * units[match[2]] > _LARGEST:
        raise CommandError(f"{option}: {text!r:.80} is above 10**18. Give one such as {example}.")
    return number * units[match[2]]
