"""Metadata of a model by the names of fields, whatever a file calls them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.architectures import Architecture, Naming


def require(values: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in values:
        raise ModelError(f"{what} lacks '{key}'")
    return values[key]


@dataclass(frozen=True, slots=True)
class Settings:
    """Metadata by the names of fields (`architectures.GGUF_KEYS`); `what` it is for people."""

    values: Mapping[str, Any]
    architecture: Architecture
    naming: Naming
    what: str

    def get(self, field: str, default: Any = None) -> Any:
        """The value, or the default where it is missing or null."""
        key = self.architecture.key(field, self.naming)
        value = self.values.get(key) if key else None
        return default if value is None else value

    def integer(self, field: str, default: int | None = None) -> int:
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelError(f"{self.what} has {self._key(field)} = {value!r}; a positive integer is needed")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._value(field, default)
        return positive(value, self._key(field), self.what)

    def _value(self, field: str, default: Any) -> Any:
        value = self.get(field, default)
        return require(self.values, self._key(field), self.what) if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        """Of a key as the file has it."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.what} has {key} = {value!r}; true or false is needed")
        return value

    def _key(self, field: str) -> str:
        return self.architecture.key(field, self.naming) or field

    def refuse_other(self, key: str, supported: Any) -> None:
        value = self.values.get(key, supported)
        if value != supported:
            raise ModelError(f"{key} = {value!r} is not supported (only {supported!r})")


def positive(value: Any, key: str, what: str) -> float:
    """A finite number above 0, or ModelError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"{key} is {value!r} in {what}, not a positive number")
    return float(value)
