"""Names of source files, as tables print them."""

import pathlib


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
