import struct
import time

import gguf
import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.io import gguf_file, mapped_file
from batchgen.io.gguf_file import GGUFFile
from tests.gguf_bytes import build, entry, pair, text
from tests.quantised import HALVES, OTHER_HALVES, SCALE_BYTES, random_blocks

BLOCK_TYPES = list(HALVES | OTHER_HALVES | SCALE_BYTES)
TYPES = ["F32", "F16", "BF16", *BLOCK_TYPES]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture
def written(path):
    """A sound file from gguf's own writer, one tensor of each type."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("yes", True)
    writer.add_array("tokens", ["<s>", "é", ""])
    writer.add_array("numbers", [1, -2, 3])
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        raw = random_blocks(rng, name, *values.shape) if name in BLOCK_TYPES else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path, raw, *words):
    path.write_bytes(raw)
    begun = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        GGUFFile.open(path)
    assert time.perf_counter() - begun < 1
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for word in words:
        assert word in message


def test_metadata_is_plain_python(written):
    metadata = GGUFFile.open(written).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["llama.block_count"], metadata["llama.rope.freq_base"], metadata["yes"]) == (7, 0.5, True)
    assert (metadata["tokens"], metadata["numbers"]) == (["<s>", "é", ""], [1, -2, 3])
    assert type(metadata["llama.block_count"]) is int and type(metadata["yes"]) is bool


def test_equals_the_gguf_reader(written):
    model, reader = GGUFFile.open(written), gguf.GGUFReader(written)
    assert list(model.tensors) == [tensor.name for tensor in reader.tensors] == TYPES
    for tensor in reader.tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = model.dequantize(tensor.name)
        assert found.shape == (3, 512) == model.tensors[tensor.name].shape
        assert found.dtype == np.float32 and found.flags.writeable
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
        np.testing.assert_array_equal(model.raw(tensor.name).ravel(), tensor.data.view(np.uint8).ravel())


def test_every_type_that_gguf_dequantises_is_tested():
    expanded = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert set(TYPES) == expanded


def test_large_tensors_are_dequantised_piece_by_piece(path, monkeypatch):
    """The pieces are those of one whole; the last is shorter."""
    monkeypatch.setattr(gguf_file, "_DEQUANTIZE_WEIGHTS", 1024)
    blocks = random_blocks(np.random.default_rng(2), "Q6_K", 9, 768)
    path.write_bytes(build([], [entry("t", [768, 9], gguf.GGMLQuantizationType.Q6_K.value, 0)], blocks.tobytes()))
    found = GGUFFile.open(path).dequantize("t")
    np.testing.assert_array_equal(found, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q6_K))


def test_pages_are_handed_back_while_views_of_them_are_in_use(written, monkeypatch):
    model = GGUFFile.open(written)
    before = {name: model.raw(name).copy() for name in TYPES}
    monkeypatch.setattr(mapped_file, "RESIDENT_BYTES", 1)
    views = {name: model.raw(name) for name in TYPES}
    for name, view in views.items():
        np.testing.assert_array_equal(view, before[name])


def test_every_truncation_is_refused(written):
    raw = written.read_bytes()
    tail = written.with_name("cut.gguf")
    for size in [*range(0, 700, 3), len(raw) // 2, len(raw) - 1024]:
        refused(tail, raw[:size])


def test_random_damage_never_crashes(written):
    raw = np.frombuffer(written.read_bytes(), np.uint8)
    random = np.random.default_rng(0)
    target = written.with_name("hit.gguf")
    for _ in range(300):
        hit = raw.copy()
        hit[random.integers(0, 900, 4)] = random.integers(0, 256, 4)
        target.write_bytes(hit.tobytes())
        try:
            model = GGUFFile.open(target)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            assert all(info.offset + info.nbytes <= len(raw) for info in model.tensors.values())


F32 = 0
ROW = np.zeros(8, np.float32).tobytes()


def test_a_small_sound_file_by_hand(path):
    path.write_bytes(build([pair("k", 4, struct.pack("<I", 5))], [entry("t", [4, 2], F32, 0)], ROW, version=2))
    model = GGUFFile.open(path)
    assert model.metadata == {"k": 5} and model.dequantize("t").shape == (2, 4)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ["empty"]),
        (b"PK\x03\x04 a zip file, not a model", ["not a GGUF file"]),
        (build(version=1), ["version 1"]),
        (build(version=3 << 24), ["big-endian"]),
        (build(tensor_count=1 << 60), ["tensors cannot fit"]),
        (build(pair_count=1 << 60), ["metadata pairs cannot fit"]),
        (build([text(b"k")[:-1] + b"\xff" + bytes(40)], pair_count=1), ["key 0", "UTF-8"]),
        (build([struct.pack("<Q", 1 << 62) + bytes(40)], pair_count=1), ["key 0", "truncated"]),
        (build([pair("k", 99, bytes(40))]), ["'k'", "value type 99"]),
        (build([pair("k", 7, b"\x02")] * 1), ["boolean"]),
        (build([pair("k", 0, b"\x02")] * 2), ["'k' occurs twice"]),
        (build([pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(40))]), ["'k'", "array of arrays"]),
        (build([pair("k", 9, struct.pack("<IQ", 8, 1 << 50))]), ["'k'", "cannot fit"]),
        (build([pair("k", 9, struct.pack("<IQ", 4, 1 << 62))]), ["'k'", "cannot fit"]),
        (build([pair("general.alignment", 4, struct.pack("<I", 24))]), ["general.alignment is 24"]),
        (build([pair("general.alignment", 8, text("x"))]), ["general.alignment is 'x'"]),
        (build([], [entry("t", [8], F32, 0)]), ["'t' ends at byte", "truncated"]),
        (build([], [entry("t", [8], F32, 1 << 63)], ROW), ["'t' ends at byte"]),
        (build([], [entry("t", [1 << 62, 1 << 62], F32, 0)], ROW), ["'t' ends at byte"]),
        (build([], [entry("t", [8], F32, 4)], ROW * 2), ["aligned"]),
        (build([], [entry("t", [8], 77, 0)], ROW), ["'t' has type number 77"]),
        (build([], [entry("t", [0], F32, 0)], ROW), ["empty"]),
        (build([], [entry("t", [], F32, 0)], ROW), ["0 dimensions"]),
        (build([], [entry("t", [1] * 5, F32, 0)], ROW), ["5 dimensions"]),
        (build([], [entry("t", [8], 8, 0)], ROW * 9), ["rows of 8 values", "Q8_0", "32"]),
        (build([], [entry("a", [16], F32, 0), entry("b", [8], F32, 32)], ROW * 3), ["'a' and 'b' overlap"]),
        (build([], [entry("t", [8], F32, 0), entry("t", [8], F32, 32)], ROW * 2), ["'t' occurs twice"]),
    ],
)
def test_malformed_files_are_named(path, raw, words):
    refused(path, raw, *words)


def test_absent_files_and_directories(tmp_path):
    for place in (tmp_path, tmp_path / "no.gguf"):
        with pytest.raises(ModelError, match="no such model file"):
            GGUFFile.open(place)


def test_unknown_tensors_and_types_without_float_form(path):
    path.write_bytes(build([], [entry("t", [8], 26, 0)], ROW))  # I32
    model = GGUFFile.open(path)
    with pytest.raises(ModelError, match="'t' has type I32"):
        model.dequantize("t")
    with pytest.raises(ModelError, match="no tensor 'u'"):
        model.dequantize("u")
