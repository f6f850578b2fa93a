"""Settings of a training: an all-reduce in every step or, as SETTING@STEPS, local SGD."""

import dataclasses
from collections.abc import Sequence

from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.settings import Setting, parse_setting, parse_settings


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An all-reduce, and the steps between two of them."""

    setting: Setting
    every: int | None = None  # None: gradients, in every step


def parse_schedule(text: str, option: str = "--settings") -> Schedule:
    """Parse one setting of a training.

    >>> parse_schedule("dynamiq:4@20").every
    20
    """
    setting, at, every = text.partition("@")
    parsed = parse_setting(setting, option)
    if not at:
        return Schedule(parsed)
    if not every.isdecimal() or int(every) < 1 or parsed.method is None:
        raise CommandError(
            f"{option}: {text!r} is not local SGD. Give METHOD[:BITS][:TOPOLOGY]@STEPS, such as "
            "dynamiq:4@20 for an outer step after every 20 local ones."
        )
    return Schedule(parsed, int(every))


def parse_schedules(texts: Sequence[str]) -> dict[str, Schedule]:
    """Parse all settings of a training, by their texts, in order.

    Raises:
      CommandError: as `parse_settings`.
    """
    found = {text: parse_schedule(text) for text in texts}
    for every in {schedule.every for schedule in found.values()}:
        same = [s.setting.name for s in found.values() if s.every == every]
        parse_settings(same)
    if len(found) < len(texts):
        raise CommandError(f"--settings: {' '.join(texts)} has one setting twice. Give it once.")
    return found
