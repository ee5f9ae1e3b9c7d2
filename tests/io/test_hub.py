"""Models from the Hugging Face Hub, whose client is replaced by one that has a few files."""

import fnmatch

import huggingface_hub
import pytest
from huggingface_hub import errors

from batchgen.errors import ModelError
from batchgen.io.model_source import model_sha256, resolve_source
from batchgen.loading import open_model
from tests.gguf_models import write_model
from tests.hf_models import write_directory


class Hub:
    """`files`: what the repository has; `fetched`: what has been taken; `down`: what is raised when it is asked."""

    def __init__(self, cache):
        self.cache, self.files, self.fetched, self.down = cache, {}, [], None

    def list_repo_files(self, repo, revision=None):
        self.ask()
        return [*self.files]

    def hf_hub_download(self, repo, name, revision=None):
        if not (self.cache / name).is_file():
            self.ask(errors.LocalEntryNotFoundError)
            if name not in self.files:
                raise answer(errors.RemoteEntryNotFoundError, f"404 Client Error.\n\nEntry Not Found: {name}")
            self.take(name)
        return str(self.cache / name)

    def snapshot_download(self, repo, revision=None, allow_patterns=("*",), local_files_only=False):
        if not local_files_only:
            self.ask()
            wanted = [name for name in self.files if any(fnmatch.fnmatch(name, p) for p in allow_patterns)]
            for name in wanted:
                if not (self.cache / name).exists():
                    self.take(name)
        elif not self.cache.exists():
            raise errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore")
        return str(self.cache)

    def ask(self, wrapped=None):
        if self.down is not None:
            raise wrapped(str(self.down)) if wrapped else self.down

    def take(self, name):
        self.fetched.append(name)
        (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
        (self.cache / name).write_bytes(self.files[name])


def answer(kind, message):
    """An error that the hub answers with; its constructor wants a response."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "models--org--name" / "snapshots" / "c0ffee")
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def resolve(source, sha256=None):
    return resolve_source(source, sha256, on_message=lambda text: None)


def refused(source):
    with pytest.raises(ModelError) as caught:
        resolve(source)
    assert "\n" not in str(caught.value) and source in str(caught.value)
    return str(caught.value)


@pytest.fixture
def directory(tmp_path, hub):
    """A model directory in three files on the hub, among what else repositories hold."""
    write_directory(tmp_path / "made", parts=3)
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    hub.files |= dict.fromkeys(("README.md", "pytorch_model.bin", "tokenizer.model", "onnx/model.onnx"), b"")
    hub.files |= {"model-00001-of-00009.safetensors": b"", "original/consolidated.pth": b"", ".gitattributes": b""}
    return hub


NEEDED = ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
PARTS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_repository_and_only_what_is_needed_of_it(directory):
    path = resolve("hf:org/name@v1")
    assert sorted(directory.fetched[:4]) == NEEDED and sorted(directory.fetched[4:]) == PARTS
    config = open_model(path).config
    assert (config.name, config.shape.num_layers) == ("org/name", 2)
    assert resolve("hf:org/name") == path and len(directory.fetched) == 7


def test_one_file_of_weights_needs_no_index(directory, tmp_path):
    write_directory(tmp_path / "whole")
    directory.files["model.safetensors"] = (tmp_path / "whole" / "model.safetensors").read_bytes()
    open_model(resolve("hf:org/name"))
    assert sorted(directory.fetched) == sorted([*NEEDED[:1], "model.safetensors", *NEEDED[2:]])


@pytest.mark.parametrize("down", [ConnectionError("no route"), errors.OfflineModeIsEnabled("offline mode is enabled")])
def test_what_is_in_the_cache_needs_no_hub(directory, down):
    path = resolve("hf:org/name")
    directory.down = down
    assert resolve("hf:org/name") == path


def test_a_hub_that_cannot_be_reached(directory):
    directory.down = ConnectionError("no route to host\nmore")
    cache = huggingface_hub.constants.HF_HUB_CACHE
    where = f"cannot be fetched, and is not whole in the cache {cache} (HF_HOME moves it)"
    assert refused("hf:org/name").endswith(f"{where}: no route to host")
    assert refused("hf:org/name/x.gguf").endswith(f"{where}: no route to host")
    directory.down = None
    resolve("hf:org/name")
    part = directory.cache / PARTS[1]
    part.unlink()
    directory.down = ConnectionError("no route to host")
    assert f"{where} ({part}: no such file; the model is split into 3 parts): no route" in refused("hf:org/name")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.RepositoryNotFoundError, "Not here.; if it is private or gated, HF_TOKEN must open it"),
        (errors.GatedRepoError, "Not here.; if it is private or gated, HF_TOKEN must open it"),
        (errors.RevisionNotFoundError, "cannot be fetched: Not here."),
    ],
)
def test_what_the_hub_refuses(hub, kind, words):
    hub.down = answer(kind, "\nNot here.\nmore")
    assert words in refused("hf:org/name")


def test_a_file_that_is_not_there(hub):
    hub.files = {"a.gguf": b""}
    assert "cannot be fetched: 404 Client Error." in refused("hf:org/name/b.gguf")


@pytest.fixture
def ggufs(tmp_path, hub):
    """A split model on the hub, in a folder."""
    (tmp_path / "made").mkdir()
    write_model(tmp_path / "made" / "m.gguf", ["Q8_0"], split_max_tensors=5)
    hub.files = {f"q8/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
    return hub


def test_all_parts_of_a_split_model_are_fetched(ggufs):
    path = resolve("hf:org/name/q8/m-00002-of-00003.gguf")
    assert path.name == "m-00002-of-00003.gguf" and len(ggufs.fetched) == 3
    assert len(open_model(path).file.tensors) == 12


def test_a_repository_with_one_gguf_model(ggufs):
    assert resolve("hf:org/name").name == "m-00001-of-00003.gguf"


def test_a_repository_with_several_gguf_models(ggufs):
    ggufs.files["q4/a.gguf"] = b""
    assert "has 2 GGUF models; name one: hf:org/name/q4/a.gguf" in refused("hf:org/name")


def test_repositories_without_a_model(hub):
    hub.files = {"README.md": b"", "config.json": b""}
    assert "has no model.safetensors beside a config.json and no GGUF file" in refused("hf:org/name")


@pytest.mark.parametrize("source", ["hf:org/name", "hf:org/name/pytorch_model.bin"])
def test_pickles_are_not_even_fetched(hub, source):
    hub.files = {"config.json": b"", "pytorch_model.bin": b""}
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: pickled weights run code when they are read"):
        resolve(source)
    assert hub.fetched == []


def test_a_single_file_of_weights_is_no_model(hub):
    with pytest.raises(ModelError, match=r"name the directory that it is in"):
        resolve("hf:org/name/model.safetensors")


def test_a_hash_of_a_repository(directory):
    assert resolve("hf:org/name", model_sha256(resolve("hf:org/name"))) == directory.cache
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, but model\.sha256 is 00"):
        resolve("hf:org/name", "0" * 64)
