"""Texts of errors and warnings about processes that trace other collectives."""

from collections.abc import Mapping, Sequence

_SHOWN = 10  # fields that an error lists
_SHOWN_LENGTH = 300  # characters of a value in an error
# Fields by which a reader recognizes a collective in a program.
_NAMING = ("collective", "axes", "topology", "method", "number of leaves", "leaf 0")

Description = Mapping[str, str]  # field to value; readable, as errors show them


def difference(descriptions: Mapping[int, Description], is_late: bool = False) -> str:
    """Return the error for descriptions that differ, by process.

    If `is_late`, some processes went on before others came.
    """
    fields = dict.fromkeys(field for each in descriptions.values() for field in each)
    lines, differing = [], set[str]()
    for field in fields:
        if field.rpartition(".")[0] in differing:  # of objects of different kinds
            differing.add(field)
            continue
        by_value: dict[str, list[int]] = {}
        for process, description in sorted(descriptions.items()):
            by_value.setdefault(description.get(field, "nothing"), []).append(process)
        if len(by_value) > 1:
            differing.add(field)
            values = (f"{v:.{_SHOWN_LENGTH}} in {named(each)}" for v, each in by_value.items())
            lines.append(f"  {field}: {'; '.join(values)}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    sent = "Some went on before the others came." if is_late else "Nothing was sent."
    return "\n".join(
        [
            f"The processes of this job disagree about a collective. {sent}",
            *lines,
            "Give all processes the same program, arguments, flags and versions. Where one traces "
            "a step for itself, use dq.inspect, or dq.Compression(check_agreement=False), which "
            "switches this check off.",
        ]
    )


def named(processes: Sequence[int]) -> str:
    """Return the name of some processes, ascending.

    >>> named([3]), named([0, 1, 2, 5])
    ('process 3', 'processes 0-2, 5')
    """
    runs: list[list[int]] = []
    for process in processes:
        if runs and runs[-1][-1] == process - 1:
            runs[-1][1:] = [process]
        else:
            runs.append([process])
    listed = ", ".join("-".join(map(str, run)) for run in runs)
    return f"process{'es' if len(processes) > 1 else ''} {listed}"


def unanswered(description: Description, missing: Sequence[int], seconds: float) -> str:
    """Return the warning for a description that some processes did not trace in time."""
    return unchecked(
        f"After {seconds:.0f} s, {named(missing)} had not traced the same step."
        f"{_traced(description)} Late processes compare theirs when they come."
    )


def compiling(description: Description, others: Sequence[int], seconds: float) -> str:
    """Return the warning for a description that some processes have traced, but not compiled."""
    return (
        f"After {seconds:.0f} s, {named(others)} had not compiled the same step, for which this "
        f"process waits.{_traced(description)} Give all hosts a full compilation cache, or none. "
        "dq.Compression(check_agreement=False) waits for nobody."
    )


def _traced(description: Description) -> str:
    named_by = (f"{name}: {description[name]:.80}" for name in _NAMING if name in description)
    listed = "; ".join(named_by)
    return f" This process traced: {listed}." if listed else ""


def unchecked(reason: str) -> str:
    """Return the warning for a collective that could not be compared."""
    return (
        f"{reason} It was not checked that all processes run the same collective. If they do not, "
        "they hang or their results are wrong. dq.Compression(check_agreement=False) switches this "
        "check off."
    )
