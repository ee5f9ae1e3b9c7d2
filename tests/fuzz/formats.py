"""What is fuzzed: a sound sample of each format, where it can be hurt, and what reads it from end to end.

Another format is another line of `FORMATS`.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from batchgen.errors import BatchgenError, RowError
from batchgen.io import gguf_file
from batchgen.kernels.base import StepLimits
from batchgen.kernels.reference import ReferenceBackend
from batchgen.loading import load_model, open_model
from batchgen.spec import load_spec
from tests.conftest import ROOT
from tests.gguf_bytes import tiny_gguf, tiny_metadata
from tests.hf_models import directory_config, hf_config, write_directory
from tests.tiny_model import Chunk, make_batch

Seams = Callable[[Path], Sequence[int]]


@dataclass(frozen=True)
class Format:
    """`sample(rng)`: the bytes of a file, sound or with a lie of its own; `seams(path)`: positions of lengths, counts
    and the like in a sound one; `read(path)`: all that the program does with it."""

    suffix: str
    sample: Callable[[np.random.Generator], bytes]
    seams: Seams
    read: Callable[[Path], None]


# --- models

LIMITS = StepLimits(max_tokens=16, max_seqs=1, num_pages=2, page_size=32)
LIES: list[Any] = [
    *(None, -1, 0, 1, 2, 7, 33, 2**31 - 1, 2**63, 2**64 - 1, True, False),
    *(float("nan"), float("inf"), -1.5, 0.0, 1e-38, 3e38),
    *("", "x", "llama", "gpt2", "\x00", "\n\x1b[31m", "é" * 5000, "{{ x", "{% for i in range(10**9) %}x{% endfor %}"),
    *([], [0], [-1], [2**63], [float("nan")], [""], ["a b"], ["a a"], ["\n"], ["x" * 3000], [True]),
]


def lying_gguf(kind: str, rng: np.random.Generator) -> bytes:
    """A model of which now and then a value of the metadata is exchanged, or an item of a list."""
    metadata = tiny_metadata(kind)
    changes: dict[str, Any] = {}
    while rng.random() < 0.4:
        key = str(rng.choice(list(metadata)))
        changes[key] = _lie(metadata[key], rng)
    return tiny_gguf(changes, kind)


def _lie(value: Any, rng: np.random.Generator) -> Any:
    lie = LIES[rng.integers(len(LIES))]
    if not isinstance(value, list) or rng.random() < 0.4:
        return lie
    start, stop = sorted(rng.integers(0, len(value) + 1, 2))
    if not isinstance(lie, type(value[0])):
        return value[start:stop]
    return [*value[:start], *[lie] * int(rng.integers(1, 3)), *value[start + 1 :]]


def read_model(path: Path) -> None:
    """Open, load, tokenise, render the chat template, compute a step, decode."""
    model = open_model(path)
    backend = ReferenceBackend("native" if path.stat().st_size % 2 else "fp32", "fp32")
    load_model(model, backend, LIMITS, lambda text: None)
    words, most = "hello <|im_end|>\n", min(16, model.config.shape.context_length)
    try:
        if model.chat is not None:
            words = model.chat.render([{"role": "user", "content": "hello"}])
        ids = model.tokenizer.encode_batch([words], parse_special=True)[0][:most]
    except RowError:
        ids = np.zeros(0, np.int32)
    ids = ids if len(ids) else np.zeros(1, np.int32)
    result = backend.run(make_batch([Chunk(ids, 0, [0])]))
    model.tokenizer.decode(result.token_ids)


def gguf_seams(path: Path) -> list[int]:
    """Where the reader takes something."""
    seams: list[int] = []
    take = gguf_file._Cursor.take

    def noting(cursor: gguf_file._Cursor, size: int, what: str) -> memoryview:
        seams.append(cursor.position)
        return take(cursor, size, what)

    with mock.patch.object(gguf_file._Cursor, "take", noting):
        file = gguf_file.GGUFFile.open(path)
    return [*seams, *(tensor.offset for tensor in file.tensors.values())]


# --- model directories, as one file: what each holds behind a line with its name

MARK = "\n--- {} ---\n"


def directory_sample(rng: np.random.Generator) -> bytes:
    """A directory whose settings may lie."""
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder), _changes(rng), kind=str(rng.choice(["F32", "F16", "BF16"])), num_layers=1)
        files = sorted(Path(folder).iterdir())
        return b"".join(MARK.format(file.name).encode() + file.read_bytes() for file in files)


def _changes(rng: np.random.Generator) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    while rng.random() < 0.2:
        changes[str(rng.choice(list(hf_config(directory_config()))))] = LIES[rng.integers(len(LIES))]
    return changes


def directory_seams(path: Path) -> list[int]:
    """Where words begin, but in the weights themselves."""
    raw = path.read_bytes()
    weights = raw.index(b"model.safetensors")
    texts = [range(0, weights + 2000), range(raw.index(b"\n--- tok"), len(raw))]
    return [at for text in texts for at in text if raw[at : at + 1] in b'"{[:,-']


def read_directory(path: Path) -> None:
    folder = Path(f"{path}.d")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pieces = re.split(rb"\n--- ([\w.]+) ---\n", path.read_bytes())
    for name, content in zip(pieces[1::2], pieces[2::2], strict=True):
        (folder / name.decode()).write_bytes(content)
    read_model(folder)


# --- specs

SPEC = """\
# a comment
name: "fuzz"
model: {source: m.gguf, sha256: null, weights: &w auto}
input:
  path: rows.parquet
  where: 'a > 1'
  messages:
    - {role: system, content: "Be brief.\\n"}
    - role: user
      content: |
        {% for x in list %}{{ x | replace("a", 'b') }}, {% endfor %}
        {{ text }}
sampling: {max_tokens: 0x10, temperature: "{{ heat }}", stop: ["a", 'b''c'], top_p: 1e-1, seed: -3}
output: {path: runs/x, columns: [a, b], part_seconds: .5}
engine: {kv_memory: 1.5GiB, kv_dtype: *w, cache: {disk_path: /tmp/x, prefetch: true}}
"""


def spec_sample(rng: np.random.Generator) -> bytes:
    texts = [SPEC, *(path.read_text("utf-8") for path in sorted((ROOT / "jobs").glob("*.yaml")))]
    return texts[rng.integers(len(texts))].encode()


def spec_seams(path: Path) -> list[int]:
    return [match.start() for match in re.finditer(rb"[^\w ]+|^ *\w", path.read_bytes(), re.MULTILINE)]


def read_spec(path: Path) -> None:
    """Load, write in full, and load that."""
    spec = load_spec(path)
    path.write_text(spec.to_yaml(), encoding="utf-8", newline="")
    if load_spec(path) != spec:
        raise AssertionError("the resolved spec reads back as another one")


FORMATS = {
    "gguf-bpe": Format(".gguf", partial(lying_gguf, "gpt2"), gguf_seams, read_model),
    "gguf-spm": Format(".gguf", partial(lying_gguf, "llama"), gguf_seams, read_model),
    "directory": Format(".directory", directory_sample, directory_seams, read_directory),
    "spec": Format(".yaml", spec_sample, spec_seams, read_spec),
}
REFUSALS = (BatchgenError,)
