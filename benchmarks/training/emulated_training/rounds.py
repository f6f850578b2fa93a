"""Settings of a training: an all-reduce in every step or, as SETTING@STEPS, local SGD.

SETTING@STEPSxTIMES takes so many times as many steps as the others.
"""

import dataclasses
import re
from collections.abc import Sequence

from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._measurement.settings import Setting, parse_setting, parse_settings


@dataclasses.dataclass(frozen=True)
class Rounds:
    """An all-reduce, and the steps between two of them."""

    setting: Setting
    every: int | None = None  # None: gradients, in every step
    times: int = 1  # local steps for each step of the others, on as many more batches


def parse_rounds(text: str, option: str = "--settings") -> Rounds:
    """Parse one setting of a training.

    >>> parse_rounds("dynamiq:4@20").every
    20
    >>> parse_rounds("dynamiq:4@20x3").times
    3
    """
    setting, at, local = text.partition("@")
    parsed = parse_setting(setting, option)
    if not at:
        return Rounds(parsed)
    found = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", local)
    if found is None or parsed.method is None:
        raise CommandError(
            f"{option}: {text!r} is not local SGD. Give METHOD[:BITS][:TOPOLOGY]@STEPS, such as "
            "dynamiq:4@20 for an outer step after every 20 local ones, or dynamiq:4@20x3 to take "
            "three times as many steps as the others."
        )
    return Rounds(parsed, int(found[1]), int(found[2] or 1))


def parse_all_rounds(texts: Sequence[str]) -> dict[str, Rounds]:
    """Parse all settings of a training, by their texts, in order.

    Raises:
      CommandError: as `parse_settings`.
    """
    found = {text: parse_rounds(text) for text in texts}
    kinds = {(rounds.every, rounds.times) for rounds in found.values()}
    for kind in kinds:
        same = [s.setting.name for s in found.values() if (s.every, s.times) == kind]
        parse_settings(same)
    if len(found) < len(texts):
        raise CommandError(f"--settings: {' '.join(texts)} has one setting twice. Give it once.")
    return found
