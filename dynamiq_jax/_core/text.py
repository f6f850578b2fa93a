"""Numbers, names of files and tables, as people read them."""

import pathlib
from collections.abc import Collection, Sequence


def format_bytes(count: float) -> str:
    """Format bytes in decimal units, as networks count.

    >>> format_bytes(7_864_320)
    '7.86 MB'
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def short_name(file: str) -> str:
    """Return the name of a file without its folders, or "cell" for a cell of a notebook.

    >>> short_name("/home/me/train.py")
    'train.py'
    >>> short_name("/tmp/ipykernel_7/1234567.py")
    'cell'
    """
    path = pathlib.Path(file)
    is_cell = path.parent.name.startswith("ipykernel_")  # which has a number for a name
    return "cell" if is_cell else path.name


def listed(names: Sequence[str]) -> str:
    """List some names, and the number of all others.

    >>> listed(["w", "v", "b"]), listed(["w", "v", "b", "u"])
    ('w, v, b', 'w, v, b and 1 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return lines of a table, with the columns of some numbers aligned to the right.

    >>> aligned([("leaf", "size"), ("bias", "8")], right=(1,))
    ['leaf  size', 'bias     8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if number in right else str.ljust for number in range(len(widths))]
    return [
        "  ".join(
            side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
