"""Vocabularies of model directories without tokenizer.json, against the libraries that made them."""

import base64
import io
import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import ModelError
from batchgen.text.pieces import byte_alphabet
from batchgen.text.pre_tokenizers import pre_tokenizers
from batchgen.text.tokenizer import Tokenizer

TEXTS = ["Hello  world", "the cat", "", " a", "héllo 👩‍👩‍👧", "x<s>y", "12345 I'LL\n\n x\t", "Straße — “quotes” 日本語"]


def ids_of(tokenizer, text, **options):
    return tokenizer.encode_batch([text], parse_special=False, add_bos=False, **options)[0].tolist()


# --- sentencepiece


def train(kind, **options):
    model = io.BytesIO()
    sentences = [
        "the cat sat on the mat",
        "hello world, hello cats",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 20),
        model_writer=model,
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"normalization_rule_name": "identity", **options},
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request):
    return train(request.param, add_dummy_prefix=True, remove_extra_whitespaces=False)


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def test_ids_are_those_of_sentencepiece(model, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = Tokenizer.from_directory(write(tmp_path, {"tokenizer.model": model}), processor.vocab_size())
    for text in TEXTS:
        if "<s>" not in text:  # which it takes for the token
            assert ids_of(tokenizer, text) == processor.encode(text)
            assert tokenizer.decode(processor.encode(text)) == (" " + text if text else "")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<s>", "</s>", {2})


@pytest.mark.parametrize("options", [{"add_dummy_prefix": False}, {"remove_extra_whitespaces": True}])
def test_spaces_as_the_model_wants_them(options, tmp_path):
    raw = train("unigram", **{"add_dummy_prefix": True, "remove_extra_whitespaces": False, **options})
    processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
    tokenizer = Tokenizer.from_directory(write(tmp_path, {"tokenizer.model": raw}), processor.vocab_size())
    for text in ("the cat", "the  cat ", "cat"):
        assert ids_of(tokenizer, text) == processor.encode(text)


def test_added_tokens_and_settings(model, tmp_path):
    added = {"330": {"content": "<|im_end|>", "special": True}, "332": {"content": "<tool>", "special": False}}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": "x"}
    files = {"tokenizer.model": model, "tokenizer_config.json": config, "generation_config.json": {"eos_token_id": [2]}}
    tokenizer = Tokenizer.from_directory(write(tmp_path, files), 340)
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_end|>", {2, 330})
    assert (tokenizer.add_bos, tokenizer.chat_template, tokenizer.vocab_size) == (False, "x", 340)
    assert 332 in ids_of(tokenizer, "a<tool>b") and 330 not in ids_of(tokenizer, "a<|im_end|>")
    assert 330 in tokenizer.encode_batch(["a<|im_end|>"], parse_special=True)[0]
    assert tokenizer.decode([331, 339]) == "[UNUSED_331]"


def test_bos_is_put_in_front_of_spm_only(tmp_path):
    for kind, expected in (("bpe", True), ("unigram", False)):
        (tmp_path / kind).mkdir()
        folder = write(tmp_path / kind, {"tokenizer.model": train(kind)})
        assert Tokenizer.from_directory(folder, 400).add_bos is expected


def gguf_of(model):
    """The same Unigram vocabulary as a GGUF file has it."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.vocab_size())
    kinds = (("is_unknown", 2), ("is_control", 3), ("is_byte", 6))
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((n for k, n in kinds if getattr(processor, k)(i)), 1) for i in ids],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.remove_extra_whitespaces": False,
    }


@pytest.fixture(scope="module")
def unigram():
    model = train("unigram", remove_extra_whitespaces=False)
    return sentencepiece.SentencePieceProcessor(model_proto=model), Tokenizer.from_gguf(gguf_of(model))


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("the catsworl é👩"), max_size=40))
def test_unigram_of_a_gguf_file(unigram, text):
    processor, tokenizer = unigram
    assert ids_of(tokenizer, text) == processor.encode(text)
    assert not tokenizer.add_bos


# --- ranks


@pytest.fixture(scope="module")
def ranks(vocabs):
    """Tokens of a byte-level vocabulary with ranks in the order of their ids."""
    metadata, letters = vocabs("llama-bpe").metadata, byte_alphabet()
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    tokens = [bytes(letters[char] for char in text) for text, kind in kinds if kind == 1]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_bytes(ranks):
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())


def oracle(ranks, pattern):
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("name", ["tokenizer.model", "some.tiktoken"])
def test_ids_are_those_of_tiktoken(ranks, tmp_path, vocabs, name):
    added = {str(len(ranks) + i): {"content": text, "special": True} for i, text in enumerate(["<|end|>", "<|begin|>"])}
    config = {"added_tokens_decoder": added, "eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}}
    folder = write(tmp_path, {name: tiktoken_bytes(ranks), "tokenizer_config.json": config})
    tokenizer = Tokenizer.from_directory(folder, 200_000, "llama-bpe")
    encoding = oracle(ranks, pre_tokenizers()["llama-bpe"].patterns[0])
    for text in [*TEXTS, *(text for text, _ in vocabs("llama-bpe").cases)]:
        ids = encoding.encode(text, disallowed_special=())
        assert ids_of(tokenizer, text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {len(ranks)} and tokenizer.add_bos


def tekken(ranks, pattern, controls=4, **changes):
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {"pattern": pattern, "default_vocab_size": len(ranks) + controls, "default_num_special_tokens": controls}
    return {"config": config | changes, "vocab": [*entries, {"rank": len(ranks), "token_bytes": "AAAA"}]}


def test_tekken(ranks, tmp_path, vocabs):
    pattern = pre_tokenizers()["tekken"].patterns[0]
    folder = write(tmp_path, {"tekken.json": tekken(ranks, pattern)})
    tokenizer, encoding = Tokenizer.from_directory(folder, 200_000), oracle(ranks, pattern)
    for text, _ in vocabs("llama-bpe").cases:
        assert ids_of(tokenizer, text) == [4 + i for i in encoding.encode(text, disallowed_special=())]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.add_bos) == ("<s>", "</s>", True)
    assert tokenizer.encode_batch(["<s>[INST]"], parse_special=True)[0].tolist() == [1, 3]


def test_control_tokens_of_tekken(ranks, tmp_path):
    content = tekken(ranks, ".", 30)
    content["special_tokens"] = [{"rank": 3, "token_str": "[OTHER]", "is_control": True}]
    tokenizer = Tokenizer.from_directory(write(tmp_path, {"tekken.json": content}), 200_000)
    found = [tokenizer.token_text(i) for i in (0, 1, 3, 10, 25)]
    assert found == ["<unk>", "<s>", "[OTHER]", "[IMG]", "<SPECIAL_25>"]


# --- what is refused

A = {bytes([byte]): byte for byte in range(256)}
CONFIG = {"tokenizer_config.json": {"eos_token": "</s>"}}
TWICE = {str(300 + i): {"content": "<x>", "special": True} for i in range(2)}
REFUSED = {
    "nothing": ({}, None, "has no tokenizer (tokenizer.json, tekken.json, tokenizer.model or NAME.tiktoken)"),
    "no model": ({"tokenizer.model": b"x"}, None, "neither a sentencepiece model nor a tiktoken file"),
    "an empty model": ({"tokenizer.model": b""}, None, "holds no vocabulary"),
    "no pattern": (
        {"a.tiktoken": tiktoken_bytes(A)},
        None,
        "name it with model.pre_tokenizer (gpt-2, llama-bpe, qwen2,",
    ),
    "an unknown pattern": ({"a.tiktoken": tiktoken_bytes(A)}, "x", "unknown pre-tokenizer 'x'"),
    "ranks with a hole": (
        {"a.tiktoken": tiktoken_bytes({b"a": 0, b"b": 2})},
        "gpt-2",
        "the ranks of its tokens are not",
    ),
    "an endless token": (
        {"a.tiktoken": tiktoken_bytes({b"a" * 9999: 0})},
        "gpt-2",
        "has tokens of none or of 9999 bytes",
    ),
    "a token of nothing": ({"tekken.json": tekken({b"": 0}, ".")}, None, "has tokens of none or of"),
    "an added token far off": (
        {
            "a.tiktoken": tiktoken_bytes(A),
            "tokenizer_config.json": {"added_tokens_decoder": {"99999999": {"content": "x"}}},
        },
        "gpt-2",
        "adds token 99999999 to a vocabulary of 256",
    ),
    "an added token twice": (
        {"a.tiktoken": tiktoken_bytes(A), "tokenizer_config.json": {"added_tokens_decoder": TWICE}},
        "gpt-2",
        "'<x>' occurs twice",
    ),
    "an added token that is none": (
        {"a.tiktoken": tiktoken_bytes(A), "tokenizer_config.json": {"added_tokens_decoder": {"300": 1}}},
        "gpt-2",
        "malformed",
    ),
    "tekken without anything": ({"tekken.json": {}}, None, "malformed: KeyError: 'config'"),
    "tekken of no JSON": ({"tekken.json": b"{"}, None, "cannot be read as JSON"),
    "tekken with a name": ({"tekken.json": tekken(A, ".")}, "tekken", "this tokenizer needs none: remove it"),
    "tekken without a pattern": ({"tekken.json": tekken(A, None)}, None, "its config names no pattern"),
    "a pattern that is none": (
        {"tekken.json": tekken(A, "(")},
        None,
        "the tokenizer's pattern is no regular expression",
    ),
    "control tokens without end": (
        {"tekken.json": tekken(A, ".", 10**9)},
        None,
        "more control tokens than there can be",
    ),
    "more tokens than the model": (
        {"tekken.json": tekken(A, ".", 200)},
        None,
        "has 456 tokens, but the model knows 400",
    ),
    "words": ({"tokenizer.model": train("word")}, None, "a sentencepiece model of words or characters"),
}


@pytest.mark.parametrize(("files", "name", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(tmp_path, files, name, words):
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_directory(write(tmp_path, files), 400, name)
    assert words in str(caught.value)


def test_a_table_of_characters_is_refused(tmp_path, unigram):
    message = r"changes characters by a table \(precompiled_charsmap\), which is read from tokenizer\.json only"
    model = train("unigram", normalization_rule_name="nmt_nfkc")
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(write(tmp_path, {"tokenizer.model": model}), 400)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": [1, 2]})
