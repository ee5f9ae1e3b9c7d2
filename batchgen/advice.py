"""Whether another order of a template's fields would share more: fields of few values belong before those of many.

Looked at are templates of nothing but text and plain `{{ column }}`; of any other there is no advice. What is computed
is estimated in characters: the first k fields cost their text once for each different combination of their values.
Text before a field goes with it, that before the first one stays where it is.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.io.table import InputTable
from batchgen.shown import counted
from batchgen.spec import InputSpec
from batchgen.text.prompt_template import Field, compile_value, plain_fields

SAMPLE_ROWS = 100_000
LEAST_SHARE, LEAST_TOKENS = 0.05, 1000
MOST_FIELDS = 12


@dataclass(frozen=True, slots=True)
class Advice:
    """Columns in a better order for the template at `key` of the spec, with how many different values each has.

    `saved_tokens` is about how many prompt tokens fewer would be computed, `saved_share` their part of all that will.
    """

    key: str
    order: tuple[str, ...]
    values: tuple[int, ...]
    before: tuple[str, ...]
    saved_tokens: int
    saved_share: float

    @property
    def text(self) -> str:
        """One line."""
        values = {name: counted(count, "value") for name, count in zip(self.order, self.values, strict=True)}
        early = next(new for new, old in zip(self.order, self.before, strict=True) if new != old)
        late = self.before[self.order.index(early)]
        order = f"with {early} first" if len(self.order) == 2 else f"in the order {', '.join(self.order)}"
        return (
            f"in {self.key}, {{{{ {early} }}}} ({values[early]}) comes after {{{{ {late} }}}} "
            f"({values[late]}); {order} about {self.saved_share:.0%} fewer prompt tokens would be computed"
        )

    def values_for_json(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """Of each row a number that is equal for equal values, and the characters of its value."""

    codes: NDArray[np.int64]
    characters: NDArray[np.int64]

    @property
    def values(self) -> int:
        return int(self.codes.max(initial=-1)) + 1


Order = list[list[Field]]
"""The fields of every template of a prompt, which has several when it is made of messages."""


def advise(given: InputSpec, table: InputTable, computed_tokens: int) -> list[Advice]:
    """Better orders of the templates of `given`, of which a run computes so many prompt tokens."""
    templates = _templates(given)
    fields = [field for template in templates.values() for field in template]
    names = [field.column for field in fields]
    if len(fields) < 2 or len(fields) > MOST_FIELDS or len(set(names)) < len(names):
        return []
    if computed_tokens < LEAST_TOKENS or not all(_is_plain(table.schema.field(name).type) for name in names):
        return []
    columns = _read(table, names)
    order = list(templates.values())
    advice = [_advice(key, number, order, columns, computed_tokens) for number, key in enumerate(templates)]
    return [each for each in advice if each is not None]


def _templates(given: InputSpec) -> dict[str, list[Field]]:
    """The fields of each template by its key; none when one of them is more than text and columns."""
    sources = {}
    if given.prompt is not None:
        sources = {"input.prompt": given.prompt}
    elif given.messages is not None and not isinstance(given.messages, str):
        if any(compile_value(message.role).columns for message in given.messages):
            return {}
        sources = {f"input.messages[{i}].content": message.content for i, message in enumerate(given.messages)}
    fields = {key: plain_fields(source) for key, source in sources.items()}
    plain = {key: found for key, found in fields.items() if found is not None}
    return plain if len(plain) == len(fields) else {}


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_floating)
    return any(check(kind) for check in (*checks, pa.types.is_boolean, pa.types.is_date))


def _read(table: InputTable, names: Sequence[str]) -> dict[str, _Column]:
    """The columns of the first `SAMPLE_ROWS` rows; of their values only hashes and lengths are kept."""
    hashes: dict[str, list[NDArray[np.uint64]]] = {name: [] for name in names}
    characters: dict[str, list[NDArray[np.int64]]] = {name: [] for name in names}
    rows = 0
    for _, batch in table.batches(sorted(names)):
        for name in names:
            values = pl.Series(pl.from_arrow(batch.column(name))).cast(pl.String)
            hashes[name].append(values.hash().to_numpy())
            characters[name].append(values.str.len_chars().fill_null(0).to_numpy().astype(np.int64))
        rows += batch.num_rows
        if rows >= SAMPLE_ROWS:
            break
    none = np.zeros(0, np.int64)
    return {
        name: _Column(
            np.unique(np.concatenate([none.astype(np.uint64), *hashes[name]]), return_inverse=True)[1],
            np.concatenate([none, *characters[name]]),
        )
        for name in names
    }


def _advice(key: str, number: int, order: Order, columns: dict[str, _Column], computed_tokens: int) -> Advice | None:
    """On the order of the fields within template `number`, the others as they are."""
    best = [*order[:number], _fewest_first(order, number, columns), *order[number + 1 :]]
    now = _characters(order, columns)
    share = 1 - _characters(best, columns) / now if now else 0.0
    tokens = round(share * computed_tokens)
    if share < LEAST_SHARE or tokens < LEAST_TOKENS:
        return None
    names, before = (tuple(field.column for field in each[number]) for each in (best, order))
    return Advice(key, names, tuple(columns[name].values for name in names), before, tokens, share)


def _fewest_first(order: Order, number: int, columns: dict[str, _Column]) -> list[Field]:
    """Next comes always the field that makes the fewest combinations with those before it."""
    left, chosen = list(order[number]), list[Field]()
    combined = _combined([columns[field.column].codes for field in chain(*order[:number])])
    while left:
        ways = [_combined([combined, columns[field.column].codes]) for field in left]
        best = int(np.argmin([way.max(initial=0) for way in ways]))
        combined = ways[best]
        chosen.append(left.pop(best))
    return chosen


def _combined(codes: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """A number for each row, equal where all of the codes are, from 0 on."""
    combined = np.zeros(1, np.int64)
    for each in codes:
        combined = np.unique(combined * (each.max(initial=0) + 1) + each, return_inverse=True)[1]
    return combined


def _characters(order: Order, columns: dict[str, _Column]) -> int:
    """Characters of the fields, each counted once per combination of values up to it."""
    total, combined = 0, np.zeros(1, np.int64)
    for field in chain(*order):
        column = columns[field.column]
        combined = _combined([combined, column.codes])
        first = np.unique(combined, return_index=True)[1]
        total += int(column.characters[first].sum()) + len(field.before) * len(first)
    return total
