"""Tables of rows by columns."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.table import Table

from dynamiq_jax._console.tables import FittedTable


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table, for rows of any type."""

    heading: str
    value: str | tuple[Any, ...] | Callable[[Any], Any]  # key, path of keys, or function of a row
    form: str = "{}"  # template of a cell, such as "{:.2f} s"

    def of(self, row: Any) -> Any:
        """Return the value of a row; None for an empty cell."""
        if callable(self.value):
            return self.value(row)
        keys = self.value if isinstance(self.value, tuple) else (self.value,)
        return functools.reduce(operator.getitem, keys, row)


def table(title: str, columns: Iterable[Column], rows: Sequence[Any], caption: str = "") -> Table:
    """Make a table with a line for each row.

    Columns whose values are all texts are left-aligned, the others are right-aligned.
    """
    made = FittedTable(title=title, title_justify="left", caption=caption, caption_justify="left")
    cells = []
    for column in columns:
        values = [column.of(row) for row in rows]
        is_text = all(isinstance(value, str) for value in values)
        made.add_column(column.heading, justify="left" if is_text else "right")
        cells.append(["" if value is None else column.form.format(value) for value in values])
    for line in zip(*cells, strict=True):
        made.add_row(*line)
    return made
