"""Errors that a user can cause, and the codes a failed row carries.

A `BatchgenError` is printed as its one line, never as a traceback; `exit_code` is what the command line returns.
"""

from typing import Literal

from batchgen.shown import visible

RowErrorCode = Literal[
    "prompt_missing",
    "prompt_too_long",
    "template_error",
    "schema_error",
    "encode_error",
    "resource_error",
    "internal_error",
]


LONGEST_MESSAGE = 1000


def shown(text: str) -> str:
    """A message on one printable line, with its middle left out where it is long: it may quote what a file holds."""
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 2 :]}"
    return visible(text)


class BatchgenError(Exception):
    """The job could not run or had to stop (exit code 1)."""

    exit_code = 1


class SpecError(BatchgenError):
    """The job spec or the command line is wrong (exit code 2): names file, key, value and what is allowed."""

    exit_code = 2


class ModelError(BatchgenError):
    """The model cannot be fetched, read or run (exit code 1)."""

    def __init__(self, message: str):
        super().__init__(shown(message))


class InputError(BatchgenError):
    """The input table cannot be read as asked (exit code 1)."""


class OutputError(BatchgenError):
    """The output cannot be written, or belongs to another job (exit code 1)."""


class TooManyErrors(BatchgenError):
    """More rows have failed than `output.max_errors` allows (exit code 1)."""


class RowError(Exception):
    """One row cannot be answered; it becomes a result with `finish_reason="error"`."""

    def __init__(self, code: RowErrorCode, message: str):
        self.code: RowErrorCode = code
        self.message = shown(message)
        super().__init__(self.message)
