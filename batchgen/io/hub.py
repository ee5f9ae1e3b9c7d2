"""Fetches models from the Hugging Face Hub, with its own client and cache: HF_HOME moves the cache, HF_TOKEN opens what
is private, HF_HUB_OFFLINE=1 keeps to what is there."""

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from batchgen.errors import ModelError
from batchgen.io.model_files import (
    INDEX,
    SETTINGS,
    TOKENIZERS,
    WEIGHTS,
    check_kind,
    gguf_part_names,
    model_files,
    safetensors_index,
)

_SOURCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?(/(?P<file>.+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSource:
    """`hf:org/name[@revision][/file]`, taken apart."""

    source: str
    repo: str
    revision: str | None
    file: str | None

    def error(self, what: str) -> ModelError:
        return ModelError(f"model.source {self.source!r} {what}")


def parse_hub(source: str) -> HubSource:
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise ModelError(f"model.source {source!r}: expected hf:ORG/NAME[@REVISION][/FILE]")
    return HubSource(source, match["repo"], match["revision"], match["file"])


def directory_name(folder: Path) -> str:
    """A model directory's name for people: in the client's cache (`models--ORG--NAME/snapshots/COMMIT`) ORG/NAME."""
    path = folder.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def fetch(wanted: HubSource, on_message: Callable[[str], None]) -> Path:
    """The path of the file (with the other parts of a split model beside it), or of a directory with what is needed of
    the repository; fetched as far as it is not in the cache already. Raises ModelError in one line."""
    if wanted.file is not None:
        check_kind(Path(wanted.file))
        on_message(f"fetching {wanted.source}")
        return _fetch_file(wanted, wanted.file)
    names = _list_files(wanted)
    if isinstance(names, Exception):
        return _cached_directory(wanted, names)
    on_message(f"fetching {wanted.source}")
    return _fetch_repository(wanted, names)


def _fetch_file(wanted: HubSource, file: str) -> Path:
    folder, name = PurePosixPath(file).parent, PurePosixPath(file).name
    paths = {part: _download(wanted, str(folder / part)) for part in gguf_part_names(name)}
    return paths[name]


def _fetch_repository(wanted: HubSource, names: Sequence[str]) -> Path:
    if "config.json" in names and (WEIGHTS in names or INDEX in names):
        return _fetch_directory(wanted, names)
    ggufs = sorted({gguf_part_names(name)[0] for name in names if name.endswith(".gguf")})
    if len(ggufs) == 1:
        return _fetch_file(wanted, ggufs[0])
    if ggufs:
        raise wanted.error(f"has {len(ggufs)} GGUF models; name one: {wanted.source}/{ggufs[0]}")
    pickles = next((name for name in sorted(names) if PurePosixPath(name).suffix in (".bin", ".pt", ".pth")), None)
    if pickles is not None:
        check_kind(Path(pickles))
    raise wanted.error(f"has no {WEIGHTS} beside a config.json and no GGUF file")


def _fetch_directory(wanted: HubSource, names: Sequence[str]) -> Path:
    """Settings first: where all weights are in the cache, these are, too."""
    tokenizers = [name for name in TOKENIZERS if name in names][:1] or [n for n in names if n.endswith(".tiktoken")]
    small = [name for name in (*SETTINGS, *tokenizers, INDEX) if name in names]
    if WEIGHTS in names:
        small = [name for name in small if name != INDEX]
    folder = _snapshot(wanted, small)
    weights = [WEIGHTS] if WEIGHTS in names else sorted(set(safetensors_index(folder).values()))
    return _snapshot(wanted, weights)


# --- the client -------------------------------------------------------------------------------------------------


def _list_files(wanted: HubSource) -> list[str] | Exception:
    """The names of the repository's files, or why the hub cannot be asked."""
    from huggingface_hub import HfApi  # here and below, since importing it is slow

    try:
        return list(HfApi().list_repo_files(wanted.repo, revision=wanted.revision))
    except Exception as error:  # its own, its HTTP library's, OSError and ValueError
        if _is_answer(error):
            raise _refusal(wanted, error) from error
        return error


def _download(wanted: HubSource, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(_asked(wanted, lambda: hf_hub_download(wanted.repo, file, revision=wanted.revision)))


def _snapshot(wanted: HubSource, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    exact = [glob.escape(name) for name in names]
    return Path(_asked(wanted, lambda: snapshot_download(wanted.repo, revision=wanted.revision, allow_patterns=exact)))


def _cached_directory(wanted: HubSource, reason: Exception) -> Path:
    """What earlier runs have fetched, if it is whole."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(wanted.repo, revision=wanted.revision, local_files_only=True))
        check_kind(folder)
        model_files(folder)
    except Exception as error:
        lacking = f" ({error})" if isinstance(error, ModelError) else ""
        raise _unreachable(wanted, reason, lacking) from error
    return folder


def _asked(wanted: HubSource, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        raise (_refusal if _is_answer(error) else _unreachable)(wanted, error) from error


def _is_answer(error: Exception) -> bool:
    """Whether it is the hub that says no, or the name that is wrong; anything else may be better another time."""
    from huggingface_hub import errors

    kinds = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    answers = isinstance(error, (*kinds, errors.HFValidationError))
    return answers and not isinstance(error, errors.LocalEntryNotFoundError)


def _refusal(wanted: HubSource, error: Exception) -> ModelError:
    from huggingface_hub import errors

    private = "; if it is private or gated, HF_TOKEN must open it" * isinstance(error, errors.RepositoryNotFoundError)
    return wanted.error(f"cannot be fetched: {_first_line(error)}{private}")


def _unreachable(wanted: HubSource, error: Exception, lacking: str = "") -> ModelError:
    from huggingface_hub.constants import HF_HUB_CACHE

    where = f"the cache {HF_HUB_CACHE} (HF_HOME moves it)"
    return wanted.error(f"cannot be fetched, and is not whole in {where}{lacking}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
