"""Numbers as people read them."""


def format_bytes(count: float) -> str:
    """Format bytes in decimal units, as networks count.

    >>> format_bytes(7_864_320)
    '7.86 MB'
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
