"""Finding control tokens in text, and keeping them apart from text that merely spells them.

A control token that is meant is written into a text as its *stand-in*: a string that starts with random characters of
Unicode's private-use plane 16, which no input can contain but by a chance of 2^-64, so no input can forge one. The
encoders know control tokens by their stand-ins alone. Four other random characters are the *guard*: put into a control
token's spelling they keep it from being found there, and they are taken out before encoding. Neither ever reaches a
token, so results do not depend on them.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any


def any_of(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words` (at least one) at a position, in time independent of
    how many there are."""
    branches: dict[str, set[str]] = {}
    for word in words:
        branches.setdefault(word[:1], set()).add(word[1:])
    optional = branches.pop("", None) is not None
    if not branches:
        return ""
    if len(branches) == 1 and not optional:
        ((first, rest),) = branches.items()
        return re.escape(first) + any_of(rest)
    body = "|".join(re.escape(first) + any_of(rest) for first, rest in sorted(branches.items()))
    return f"(?:{body})" + ("?" if optional else "")


class Spellings:
    """The control tokens of one vocabulary, by spelling.

    tokens: spelling → id.
    """

    def __init__(self, tokens: Mapping[str, int]):
        self.token_ids = frozenset(tokens.values())
        self.guard = _random_characters()
        mark = _random_characters()
        self.stand_ins = {spelling: f"{mark}{i};" for spelling, i in tokens.items()}
        self._pattern = re.compile(any_of(tokens) or r"(?!)")
        self._beginnings = {text[:n] for text in tokens for n in range(1, len(text)) if not text[:n].isalnum()}
        self._longest = max(map(len, self._beginnings), default=0)

    def mark(self, text: str) -> str:
        """Replaces every spelling of a control token (leftmost, longest) by its stand-in and takes guards out."""
        return self.unprotect(self._pattern.sub(lambda match: self.stand_ins[match[0]], text))

    def protect(self, value: Any) -> Any:
        """`value` (a string, or lists and mappings of them) with a guard in every spelling.

        A string whose end could be the beginning of one is closed with a guard too, so that what a template puts
        behind it cannot complete the spelling.
        """
        if isinstance(value, str):
            return self._close(self._pattern.sub(lambda match: match[0][:1] + self.guard + match[0][1:], value))
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def unprotect(self, text: str) -> str:
        """`text` without guards: what a person should see."""
        return text.replace(self.guard, "")

    def _close(self, text: str) -> str:
        stem = text.rstrip()
        if any(stem[-n:] in self._beginnings for n in range(1, min(self._longest, len(stem)) + 1)):
            return stem + self.guard + text[len(stem) :]
        return text


def _random_characters() -> str:
    return "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(4))
