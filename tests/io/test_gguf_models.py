"""Whole GGUF models: every type of weight, and models in several files."""

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.io.gguf_file import GGUFFile
from batchgen.io.model_source import file_sha256, model_sha256, resolve_source
from batchgen.kernels.base import StepLimits
from batchgen.kernels.cpu.features import available_kernels
from batchgen.loading import Numerics, describe_model, load_model, make_backend, open_model
from tests.gguf_models import write_model
from tests.io.test_gguf_file import TYPES
from tests.tiny_model import Chunk, make_batch

LIMITS = StepLimits(max_tokens=64, max_seqs=64, num_pages=4, page_size=32)
TOKENS = np.arange(4, 40, dtype=np.int32)


def logits(path, kernel, weights):
    """Of every token of a sequence."""
    backend = make_backend(Numerics(kernel, weights, "fp32"), 1)
    load_model(open_model(path), backend, LIMITS, lambda text: None)
    rows = np.arange(len(TOKENS), dtype=np.int32)
    found = backend.run(make_batch([Chunk(TOKENS, 0, [0, 1])], needs_logits=True, logits_rows=rows)).logits
    found = found[: len(TOKENS)].copy()
    backend.close()
    return found


def test_a_model_of_every_type_gives_the_same_logits_as_codes_and_expanded(tmp_path):
    path = tmp_path / "mixed.gguf"
    write_model(path, TYPES, num_layers=5)
    assert {info.type_name for info in GGUFFile.open(path).tensors.values()} == set(TYPES)
    narrow = available_kernels()[0]
    native, expanded = (logits(path, narrow, weights) for weights in ("native", "bf16"))
    assert np.ptp(expanded) > 0.1
    np.testing.assert_array_equal(native, expanded)
    exact, rounded = (logits(path, "reference", weights) for weights in ("fp32", "native"))
    scale = exact.std()
    assert np.abs(rounded - exact).mean() < 0.02 * scale  # what rounding to bfloat16 costs
    assert np.abs(native - exact).mean() < 0.04 * scale  # here activations are rounded, too


@pytest.fixture
def split(tmp_path):
    """A model in three parts, and the same in one."""
    write_model(tmp_path / "model.gguf", ["Q8_0", "Q4_K"], num_layers=1, split_max_tensors=5)
    write_model(tmp_path / "whole.gguf", ["Q8_0", "Q4_K"], num_layers=1)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name[-20:] for part in parts] == [f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_part_stands_for_the_whole(split, number):
    whole, parts = (GGUFFile.open(path) for path in (split[0].with_name("whole.gguf"), split[number]))
    assert parts.tensors.keys() == whole.tensors.keys()
    assert parts.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
    for name in whole.tensors:
        np.testing.assert_array_equal(parts.dequantize(name), whole.dequantize(name))
    described = describe_model("m", split[number], open_model(split[number]))
    assert described["file_bytes"] == sum(part.stat().st_size for part in split)


def test_the_hash_of_a_split_model_is_that_of_all_parts(split):
    first = model_sha256(split[0])
    assert first == model_sha256(split[2]) and first not in map(file_sha256, split)
    assert resolve_source(str(split[1]), first, on_message=lambda text: None) == split[1]
    with pytest.raises(ModelError, match=f"has sha256 {first}, but model.sha256 is 00"):
        resolve_source(str(split[1]), "0" * 64, on_message=lambda text: None)


def refused(path):
    with pytest.raises(ModelError) as caught:
        GGUFFile.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_that_are_missing(split):
    split[1].unlink()
    assert refused(split[0]) == f"{split[1]}: no such file; the model is split into 3 parts"
    split[0].unlink()
    assert refused(split[2]) == f"{split[0]} (and 1 more): no such file; the model is split into 3 parts"


def test_parts_that_are_cut(split):
    split[1].write_bytes(split[1].read_bytes()[:-100])
    assert str(split[1]) in (message := refused(split[0])) and "truncated" in message


def test_parts_in_each_others_places(split):
    split[1].write_bytes(split[2].read_bytes())
    assert "its name says part 1 (from 0) of 3, its metadata part 2 of 3" in refused(split[0])


def test_a_part_of_another_name(split):
    other = split[1].rename(split[1].with_name("second.gguf"))
    assert f"{other}: part 1 (from 0) of 3 of a split model; the others are found only if" in refused(other)


def test_a_whole_model_named_like_a_part(split):
    lonely = split[0].with_name("x-00001-of-00001.gguf")
    split[0].with_name("whole.gguf").rename(lonely)
    assert GGUFFile.open(lonely).tensors
    liar = lonely.rename(lonely.with_name("x-00001-of-00002.gguf"))
    liar.with_name("x-00002-of-00002.gguf").write_bytes(liar.read_bytes())
    assert "its name says part 0 (from 0) of 2, its metadata part 0 of 1" in refused(liar)


@pytest.mark.parametrize(
    ("num_layers", "most", "message"),
    [(2, 8, "the parts have 15 tensors together, not 12 as they say"), (1, 4, "is in another part of the split model")],
)
def test_parts_of_two_models(split, tmp_path, num_layers, most, message):
    """Of as many parts each, but with other tensors in them."""
    (tmp_path / "other").mkdir()
    write_model(tmp_path / "other" / "model.gguf", ["Q8_0"], num_layers, split_max_tensors=most)
    split[2].write_bytes((tmp_path / "other" / split[2].name).read_bytes())
    assert message in refused(split[0])
