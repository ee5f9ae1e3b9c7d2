import hashlib
import json

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.io.model_source import model_sha256, resolve_source
from batchgen.io.safetensors_file import SafetensorsModel
from tests.hf_models import safetensors_bytes, stored, with_header, write_weights

VALUES = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)


def opened(folder):
    return SafetensorsModel.open(folder)


def refused(folder):
    with pytest.raises(ModelError) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_of_every_width(tmp_path, kind):
    write_weights(tmp_path, {"a": VALUES, "b": VALUES[0] * 3}, kind)
    model = opened(tmp_path)
    expected = VALUES
    if kind == "F16":
        expected = VALUES.astype(np.float16).astype(np.float32)
    if kind == "BF16":
        expected = (VALUES.view(np.uint32) & 0xFFFF0000).view(np.float32)
    found = model.floats("a")
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32 and found.flags.writeable and model.tensors["a"].shape == (6, 10)
    assert model.floats("b").shape == (10,)


def test_files_of_the_safetensors_package(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = {"a": VALUES, "b": VALUES.astype(np.float16), "none": VALUES[:0]}
    numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = opened(tmp_path)
    assert model.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(model.floats(name), values.astype(np.float32))


def test_weights_in_several_files(tmp_path):
    tensors = {name: VALUES * i for i, name in enumerate("abcde")}
    write_weights(tmp_path, tensors, parts=3)
    model = opened(tmp_path)
    for name, values in tensors.items():
        np.testing.assert_array_equal(model.floats(name), values)


def test_the_hash_of_a_directory_is_that_of_all_that_is_read(tmp_path):
    write_weights(tmp_path, dict.fromkeys("abc", VALUES), parts=3)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("not read")
    digest = model_sha256(tmp_path)
    names = ["config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))]
    lines = [f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    assert digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert resolve_source(str(tmp_path), digest, on_message=lambda text: None) == tmp_path
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"but model.sha256 is {digest}"):
        resolve_source(str(tmp_path), digest, on_message=lambda text: None)


def test_files_that_are_missing_or_cut(tmp_path):
    write_weights(tmp_path, dict.fromkeys("abcde", VALUES), parts=3)
    part = tmp_path / "model-00002-of-00003.safetensors"
    raw = part.read_bytes()
    part.write_bytes(raw[:-8])
    assert f"{part}: not a sound safetensors file: tensor 'e' ends at byte" in refused(tmp_path)
    part.write_bytes(raw[:5])
    assert "it has no header (truncated?)" in refused(tmp_path)
    part.unlink()
    assert refused(tmp_path) == f"{part}: no such file; the model is split into 3 parts"


INDEXES = {
    "not JSON": ("{", "cannot be read as JSON"),
    "no map": ("{}", "its weight_map does not say"),
    "an empty map": ('{"weight_map": {}}', "its weight_map does not say"),
    "numbers for files": ('{"weight_map": {"a": 1}}', "its weight_map does not say"),
    "a file elsewhere": ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not the name of a file"),
    "a file anywhere": ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd' is not the name of a file beside it"),
    "a tensor of another file": (
        '{"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}',
        "lacks tensor 'a', which the index says it has",
    ),
    "a tensor of none": (
        '{"weight_map": {"c": "model-00002-of-00002.safetensors"}}',
        "lacks tensor 'c', which the index says it has",
    ),
}


@pytest.mark.parametrize(("index", "words"), INDEXES.values(), ids=INDEXES)
def test_indexes_that_lie(tmp_path, index, words):
    write_weights(tmp_path, {"a": VALUES, "b": VALUES}, parts=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert words in refused(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    write_weights(tmp_path, {"a": VALUES, "b": VALUES}, parts=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    second.write_bytes(first.read_bytes())
    assert refused(tmp_path) == f"{second}: tensor 'a' is in another file of the model, too"


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


DATA = bytes(8)
HEADERS = {
    "no object": (with_header([], DATA), "a JSON object is expected"),
    "not JSON": (with_header("{", DATA), "cannot be read as JSON"),
    "not UTF-8": (b"\x02" + bytes(7) + b"\xff\xff", "cannot be read as JSON"),
    "nested without end": (with_header("[" * 100_000, DATA), "cannot be read as JSON"),
    "longer than the file": (b"\xff" * 8 + bytes(100), "a header of 18446744073709551615 bytes in a file of 108"),
    "a name twice": (
        with_header(f'{{"t": {json.dumps(entry())}, "t": {json.dumps(entry())}}}', DATA),
        "'t' occurs twice",
    ),
    "an entry that is none": (with_header({"t": 1}, DATA), "the entry of tensor 't' is not dtype, shape and"),
    "another key": (with_header({"t": entry(more=1)}, DATA), "the entry of tensor 't' is not dtype, shape and"),
    "an unknown type": (with_header({"t": entry(dtype="F4")}, DATA), "tensor 't' has unknown type 'F4'"),
    "a type that is none": (with_header({"t": entry(dtype=[])}, DATA), "tensor 't' has unknown type []"),
    "a negative size": (with_header({"t": entry(shape=[-2])}, DATA), "tensor 't' has shape [-2]"),
    "a size that is true": (with_header({"t": entry(shape=[True])}, DATA), "tensor 't' has shape [True]"),
    "too many dimensions": (with_header({"t": entry(shape=[1] * 9)}, DATA), "tensor 't' has shape [1, 1,"),
    "three offsets": (with_header({"t": entry(data_offsets=[0, 4, 8])}, DATA), "data_offsets [0, 4, 8]"),
    "offsets turned round": (with_header({"t": entry(data_offsets=[8, 0])}, DATA), "has -8 bytes; F32 of [2] takes 8"),
    "a wrong length": (with_header({"t": entry(shape=[3])}, DATA), "has 8 bytes; F32 of [3] takes 12"),
    "as many values as there are in no file": (
        with_header({"t": entry(shape=[1 << 62, 1 << 62])}, DATA),
        "has 8 bytes; F32 of [4611686018427387904, 4611686018427387904] takes",
    ),
    "out of the file": (with_header({"t": entry()}, DATA[:4]), "'t' ends at byte 77, but the file has 73 (truncated?)"),
    "overlapping": (
        with_header({"t": entry(), "u": entry(shape=[1], data_offsets=[4, 8])}, DATA),
        "tensor 'u' overlaps tensor 't'",
    ),
    "the same bytes twice": (with_header({"t": entry(), "u": entry()}, DATA), "tensor 'u' overlaps tensor 't'"),
    "a hole": (with_header({"t": entry(data_offsets=[8, 16])}, DATA * 2), "tensor 't' does not follow the header"),
    "bytes of nothing": (with_header({"t": entry()}, DATA * 2), "8 bytes after tensor 't' belong to no tensor"),
}


@pytest.mark.parametrize(("raw", "words"), HEADERS.values(), ids=HEADERS)
def test_headers_that_lie(tmp_path, raw, words):
    (tmp_path / "model.safetensors").write_bytes(raw)
    message = refused(tmp_path)
    assert words in message and str(tmp_path / "model.safetensors") in message


def test_types_that_are_no_weights(tmp_path):
    raw = safetensors_bytes({"t": ("I8", (3,), bytes(3)), "u": ("F32", (6, 10), stored(VALUES, "F32"))})
    (tmp_path / "model.safetensors").write_bytes(raw)
    model = opened(tmp_path)
    np.testing.assert_array_equal(model.floats("u"), VALUES)  # not aligned
    with pytest.raises(ModelError, match="tensor 't' has type I8, where numbers are expected"):
        model.floats("t")


def test_directories_without_weights(tmp_path):
    assert "has no model.safetensors and no model.safetensors.index.json" in refused(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert refused(tmp_path).endswith("name one of its GGUF files, such as a.gguf")
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickled weights run code when they are read" in refused(tmp_path)
