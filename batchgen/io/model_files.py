"""Which files make up a model."""

import re
from pathlib import Path

from batchgen.errors import ModelError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def gguf_part_names(name: str) -> list[str]:
    """The file names of all parts of a split model, of which `name` is one (`model-00002-of-00003.gguf`); of another
    file only its own."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def gguf_parts(path: Path) -> list[Path]:
    """The files of the model that `path` is (a part of). ModelError when one of them is not there."""
    parts = [path.with_name(name) for name in gguf_part_names(path.name)]
    missing = [part for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}{more}: no such file; the model is split into {len(parts)} parts")
    return parts


def model_files(path: Path) -> list[Path]:
    """All files of the model at `path` that are read, in a fixed order."""
    return gguf_parts(path)
