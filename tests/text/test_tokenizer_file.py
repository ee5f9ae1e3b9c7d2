import functools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from batchgen.errors import ModelError
from batchgen.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(vocabs, tmp_path_factory):
    """A byte-level file like those of GPT-2 and its kin; BOS is put in front, and texts would be cut to 4 tokens."""
    metadata = vocabs("gpt-2").metadata
    vocab = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    pattern = Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    parts = [
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", AddedToken("<mask>", lstrip=True), "<end>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 50256)])
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """A file like Llama's: byte fallback, spaces as U+2581, only the first word gets a space in front."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *"▁abc", "ab", "▁a", "▁ab", "▁b"]
    vocab = {text: i for i, text in enumerate(pieces)}
    model = models.BPE(vocab, [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """A file like T5's and its kin: scores, byte fallback, extra spaces removed, characters normalised."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *"▁abc", "ab", "▁a", "▁ab", "▁b", "b▁a"]
    scores = [0.0] * 259 + [-3.0 - i / 7 for i in range(len(pieces) - 259)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("unigram") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@functools.cache
def own_tokenizer(path):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    return tokenizer


def native(path, texts, meant):
    """Ids by the file's own tokenizer, unchanged."""
    tokenizer = own_tokenizer(path)
    tokenizer.encode_special_tokens = not meant
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def ids_of(tokenizer, texts, **options):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts, add_bos=False, **options)]


PIECES = st.lists(
    st.sampled_from(["a", "b", " ", "ab", "é", "<s>", "</s>", "<end>", "<mask>", "<tool>", "\n"]), max_size=12
)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES)
def test_ids_are_those_of_the_files_own_tokenizer(pieces, byte_level, metaspace):
    text = "".join(pieces)
    for path in (byte_level, metaspace):
        tokenizer = known(path)
        for meant in (False, True):
            assert ids_of(tokenizer, [text], parse_special=meant) == native(path, [text], meant)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES)
def test_unigram(pieces, unigram):
    """The file's own tokenizer takes a control token's spelling for the token even where it is text."""
    text = "".join(pieces)
    assert ids_of(known(unigram), [text], parse_special=True) == native(unigram, [text], True)
    plain = ids_of(known(unigram), [text], parse_special=False)
    assert not {0, 1, 2} & set(plain[0])
    if "s>" not in text:
        assert plain == native(unigram, [text], False)


@functools.cache
def known(path):
    return Tokenizer.from_file(path)


def test_long_texts_are_not_cut(byte_level):
    assert len(ids_of(known(byte_level), ["a b c d e f"], parse_special=False)[0]) == 6


def test_bos_of_the_post_processor(byte_level, metaspace):
    tokenizer = known(byte_level)
    assert (tokenizer.add_bos, tokenizer.bos_token_id, tokenizer.bos_token) == (True, 50256, "<|endoftext|>")
    assert tokenizer.encode_batch(["a"], parse_special=False)[0].tolist() == [50256, 64]
    assert not known(metaspace).add_bos and known(metaspace).bos_token_id is None


def test_decoding(byte_level, metaspace):
    tokenizer = known(byte_level)
    ids = ids_of(tokenizer, ["a 👩<tool><end>"], parse_special=True)[0]
    assert tokenizer.decode(ids) == "a 👩<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "a 👩<tool><end>"
    spaced = ids_of(known(metaspace), ["ab é</s>"], parse_special=True)[0]
    assert known(metaspace).decode(spaced) == " ab é"
    assert tokenizer.vocab_size == 50260


def test_rendered_text(metaspace):
    tokenizer = known(metaspace)
    text = f"<s>a{tokenizer.protect('</s>')} b</s>"
    ids = tokenizer.encode_rendered_batch([text])[0].tolist()
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids) == "a</s> b"


def test_settings_beside_the_file(metaspace, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(metaspace.read_bytes())
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = Tokenizer.from_file(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.add_bos) == ("<s>", "</s>", True)
    assert tokenizer.eos_token_ids == {2, 5} and tokenizer.chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_file(path).chat_template == "new"
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_file(path).chat_template == "d"
    assert Tokenizer.from_file(path).fingerprint != known(metaspace).fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "as JSON"),
        ("[]", "JSON object"),
        ("{}", "not a tokenizer.json"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "decoder none"),
        ('{"model": {"type": "What", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}', "cannot be built"),
    ],
)
def test_unusable_files(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_unknown_decoders_are_refused(metaspace, tmp_path):
    data = json.loads(metaspace.read_text())
    data["decoder"] = decoders_json(decoders.WordPiece())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_file(path)


def decoders_json(decoder):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.decoder = decoder
    return json.loads(tokenizer.to_str())["decoder"]


def test_normalisers_of_the_file_work(metaspace, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(metaspace))
    tokenizer.normalizer = normalizers.Lowercase()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    text = "AB <S> <s>"
    assert ids_of(Tokenizer.from_file(path), [text], parse_special=True) == native(path, [text], True)
