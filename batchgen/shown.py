"""Texts and values on their way to people: what is in them must neither steer a terminal nor be too much for one."""

import json
import sys
from typing import Any, TextIO


def write_anything(*streams: TextIO) -> None:
    """Let streams write characters that their encoding lacks as escapes, where they would raise."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)  # a test's stream may have none
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def writes_unicode(stream: TextIO) -> bool:
    return (stream.encoding or "utf-8").lower().startswith("utf")


def visible(text: str) -> str:
    """Control characters as escapes (a newline is `\\\\n`), so that a text stays on its line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def json_text(value: Any, stream: TextIO | None = None) -> str:
    """JSON for `stream` (stdout): characters that it cannot write, or should not, are JSON's own escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=not writes_unicode(stream or sys.stdout))
    return "\n".join(line if line.isprintable() else "".join(map(_escaped, line)) for line in text.split("\n"))


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def counted(count: int, noun: str) -> str:
    """`1 value`, `1,200 values`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
