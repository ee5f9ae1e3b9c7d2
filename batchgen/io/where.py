"""A condition that says which rows of the input count."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.errors import SpecError
from batchgen.io.sources import first_line

_SHOWN_NAMES = 50
_KEEP = "__batchgen_keep__"
_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException)


def nearest(name: str, names: Sequence[str]) -> str:
    """ " (did you mean 'x'?)" if one of the names is near."""
    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def listed(names: Sequence[str]) -> str:
    """The names in one line, the first of them where they are many."""
    shown = [name if name.isprintable() else repr(name) for name in names[:_SHOWN_NAMES]]
    return ", ".join(shown) + (f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else "")


class Where:
    """A condition on one row, written in polars' SQL. `columns` are those it needs."""

    def __init__(self, text: str, schema: pa.Schema):
        self._text = text
        self._expression = self._parse()
        self.columns = list(dict.fromkeys(self._expression.meta.root_names()))
        self._check(schema)

    def mask(self, index: NDArray[np.int64], batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows of the batch satisfy the condition; null does not."""
        needed = batch.select(self.columns)
        try:
            needed.validate(full=True)  # polars trusts that text is UTF-8
            keep = self._evaluate(pa.Table.from_batches([needed]), len(index))
        except _ERRORS as error:
            raise self._error(f"fails on rows {index[0]} to {index[-1]}: {first_line(error)}") from error
        return keep.fill_null(False).to_numpy().astype(bool)

    def _evaluate(self, table: pa.Table, rows: int) -> pl.Series:
        frame = (
            pl.DataFrame(pl.from_arrow(table)) if self.columns else pl.DataFrame({"": pl.repeat(0, rows, eager=True)})
        )
        return frame.with_columns(self._expression.alias(_KEEP))[_KEEP]

    def _error(self, what: str) -> SpecError:
        return SpecError(f"input.where {self._text!r} {what}")

    def _parse(self) -> pl.Expr:
        try:
            expression = pl.sql_expr(self._text)
        except pl.exceptions.PolarsError as error:
            raise self._error(f"is not a condition in polars SQL: {first_line(error)}") from error
        tree = json.loads(expression.meta.serialize(format="json"))
        if "Alias" in tree or _looks_at_other_rows(tree):
            raise self._error("must be one condition on a single row (no aggregate, window, subquery or alias)")
        return expression

    def _check(self, schema: pa.Schema) -> None:
        for name in self.columns:
            if name not in schema.names:
                raise self._error(
                    f"needs column {name!r}{nearest(name, schema.names)}; columns: {listed(schema.names)}"
                )
            if _panics(schema.field(name).type):
                raise self._error(f"cannot use column {name!r} of type {schema.field(name).type}")
        try:
            empty = pa.schema([schema.field(name) for name in self.columns]).empty_table()
            kind = self._evaluate(empty, 0).dtype
        except _ERRORS as error:
            raise self._error(
                f"does not fit the columns: {first_line(error)}; {_columns_with_types(schema)}"
            ) from error
        if kind not in (pl.Boolean, pl.Null):
            raise self._error(f"gives {kind}, not true or false")


def _panics(kind: pa.DataType) -> bool:
    """Whether polars panics on the type, or on one inside it: it would tell the user all about its stack."""
    if pa.types.is_timestamp(kind):
        return (kind.tz or "").startswith(("+", "-"))
    return pa.types.is_decimal256(kind) or pa.types.is_interval(kind) or any(map(_panics, inner_types(kind)))


def inner_types(kind: pa.DataType) -> list[pa.DataType]:
    """The types that a nested type is made of."""
    fields = [field.type for field in kind] if pa.types.is_struct(kind) or pa.types.is_union(kind) else []
    parts = ("value_type", "key_type", "item_type", "storage_type")
    return fields + [getattr(kind, name) for name in parts if hasattr(kind, name)]


def _columns_with_types(schema: pa.Schema) -> str:
    return "columns: " + listed([f"{field.name} {field.type}" for field in schema])


def _looks_at_other_rows(node: Any) -> bool:
    """Whether polars' serialised expression holds a node whose value at a row depends on other rows."""
    if isinstance(node, list):
        return any(map(_looks_at_other_rows, node))
    if not isinstance(node, dict):
        return bool(node == "Len")
    if node.keys() & {"Agg", "Over", "Window", "Rolling", "SubPlan"}:
        return True
    return any(
        _looks_at_other_rows(value) for key, value in node.items() if key not in ("Column", "Literal", "function")
    )
