"""Folders named `key=value` below an input's base, which become columns (hive partitions).

A column whose type is not declared is int32 when every folder's value reads as one, else string, as in pyarrow's
discovery. `__HIVE_DEFAULT_PARTITION__` is null.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from batchgen.errors import InputError
from batchgen.io.sources import SourceFile, first_line

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True, eq=False)
class Partitions:
    """The folders' columns: their types, each file's values, and what of them might surprise (a line each)."""

    schema: pa.Schema
    values: list[dict[str, pa.Scalar]]
    notes: tuple[str, ...]


def read_partitions(files: Sequence[SourceFile], declared: Mapping[str, pa.DataType]) -> Partitions:
    """Raises InputError for a folder whose value does not read as the type declared for its key."""
    texts = [_texts(file) for file in files]
    names = list(dict.fromkeys(name for found in texts for name in found))
    columns = [_Column(name, [found.get(name) for found in texts], files, declared.get(name)) for name in names]
    values = [column.values() for column in columns]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{} for _ in files]
    notes = tuple(note for column in columns for note in column.notes())
    return Partitions(pa.schema([(column.name, column.type) for column in columns]), rows, notes)


def _texts(file: SourceFile) -> dict[str, str]:
    """The values of the file's folders by key, as they are written."""
    found = {}
    for folder in file.name.split("/")[:-1]:
        key, equals, text = folder.partition("=")
        if equals and key:
            found[unquote(key)] = unquote(text)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    name: str
    texts: list[str | None]  # of each file; None where it lies in no such folder
    files: Sequence[SourceFile]
    declared: pa.DataType | None

    @property
    def type(self) -> pa.DataType:
        return self.declared or (pa.string() if self._odd_texts() else pa.int32())

    def values(self) -> list[pa.Scalar]:
        kind = self.type
        known: dict[str | None, pa.Scalar] = dict.fromkeys((None, _NULL), pa.scalar(None, kind))
        for number, text in enumerate(self.texts):
            if text not in known:
                known[text] = self._value(text, kind, self.files[number])
        return [known[text] for text in self.texts]

    def _value(self, text: str | None, kind: pa.DataType, file: SourceFile) -> pa.Scalar:
        try:
            return pa.scalar(text, pa.string()).cast(kind)
        except pa.ArrowException as error:
            raise InputError(
                f"{file.shown}: folder '{self.name}={text}' cannot be read as {kind}, which input.column_types says "
                f"of '{self.name}': {first_line(error)}"
            ) from error

    def notes(self) -> Iterator[str]:
        odd = self._odd_texts()
        if self.declared is None and odd and any(map(_is_int32, filter(None, self.texts))):
            yield (
                f"folder '{self.name}={odd[0]}' is no int32 as others are, so column '{self.name}' is text; "
                f"input.column_types: {{{self.name}: string}} says that it is meant so"
            )
        if None in self.texts:
            file = self.files[self.texts.index(None)]
            yield f"{file.shown} lies in no folder '{self.name}=…' as others do; its rows have null there"

    def _odd_texts(self) -> list[str]:
        texts = set(self.texts) - {None, _NULL}
        return sorted(text for text in texts if text is not None and not _is_int32(text))


def _is_int32(text: str) -> bool:
    try:
        return pa.scalar(text, pa.string()).cast(pa.int32()).is_valid
    except pa.ArrowException:
        return False
