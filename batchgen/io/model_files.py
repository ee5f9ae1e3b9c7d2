"""Which files make up a model, and what is read of them in common."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import Codes

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")
"""The first that is there is read, or else a `.tiktoken` file."""
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a model. `shape` is in numpy order, slowest axis first: (out features, in features) for a linear.

    `name` and `type_name` ("F32", "Q4_1", ...) are the file's; `offset` is the byte position in the file (the `part`-th
    of the model, from 0), `nbytes` the stored size.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int
    part: int = 0


class WeightsFile(Protocol):
    """An opened model, its `tensors` by name."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> dict[str, TensorInfo]: ...
    def dequantize(self, name: str) -> NDArray[np.float32]: ...
    def codes(self, name: str) -> Codes | None: ...


def model_files(path: Path) -> list[Path]:
    """All files of the model at `path` that are read, in a fixed order: a GGUF file or its parts; of a directory the
    settings that there are and the weights."""
    if not path.is_dir():
        return gguf_parts(path)
    settings = [path / name for name in SETTINGS if (path / name).is_file()]
    tokenizer = tokenizer_path(path)
    return [*settings, *([] if tokenizer is None else [tokenizer]), *safetensors_files(path)]


def tokenizer_path(directory: Path) -> Path | None:
    """The file of a directory that its vocabulary is read from."""
    paths = [*(directory / name for name in TOKENIZERS), *sorted(directory.glob("*.tiktoken"))]
    return next((path for path in paths if path.is_file()), None)


def check_kind(path: Path) -> None:
    """ModelError for what is no model that can be read, with what to do about it."""
    if path.suffix in _PICKLES:
        raise ModelError(f"{path}: {_CONVERT}")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: name the directory that it is in, where its config.json is, too")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path}: a directory without config.json{_ggufs_in(path)}")


_CONVERT = (
    "pickled weights run code when they are read, so they are not read; convert them once where you trust them: "
    "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR), "
    "and AutoTokenizer.from_pretrained(DIR).save_pretrained(NEW_DIR)"
)


def _ggufs_in(path: Path) -> str:
    names = sorted(file.name for file in path.glob("*.gguf"))
    return f"; name one of its GGUF files, such as {names[0]}" if names else ""


# --- GGUF -------------------------------------------------------------------------------------------------------


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
    if len(parts) > 1:
        _check_present(parts)
    return parts


def _check_present(parts: list[Path]) -> None:
    missing = [part for part in parts if not part.is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}{more}: no such file; the model is split into {len(parts)} parts")


# --- safetensors ------------------------------------------------------------------------------------------------


def safetensors_files(directory: Path) -> list[Path]:
    """The files that hold the weights: `model.safetensors`, or all those that its index names."""
    single = directory / WEIGHTS
    if single.is_file():
        return [single]
    if not (directory / INDEX).is_file():
        pickles = any(file.suffix in _PICKLES for file in directory.iterdir())
        what = f"has no {WEIGHTS} and no {INDEX}"
        raise ModelError(f"{directory}: {_CONVERT}" if pickles else f"{directory}: {what}{_ggufs_in(directory)}")
    parts = [directory / name for name in sorted(set(safetensors_index(directory).values()))]
    _check_present(parts)
    return parts


def safetensors_index(directory: Path) -> dict[str, str]:
    """Tensor → file, as the directory's index says; empty where there is none."""
    path = directory / INDEX
    if (directory / WEIGHTS).is_file() or not path.is_file():
        return {}
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelError(f"{path}: its weight_map does not say which file each tensor is in")
    strange = next((name for name in index.values() if Path(name).name != name or "\0" in name), None)
    if strange is not None:
        raise ModelError(f"{path}: {strange!r} is not the name of a file beside it")
    return index


# --- JSON -------------------------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    return parse_json(path, read_bytes(path))


def parse_json(path: Path, content: bytes, unique: bool = False) -> dict[str, Any]:
    """A JSON object. ModelError, naming the file, for anything else, and if `unique` for a key that occurs twice."""
    try:
        data = json.loads(content, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return found
