import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from batchgen.errors import ModelError
from batchgen.text.pre_tokenizers import find_pre_tokenizer, nearest, pre_tokenizers

NAMES = sorted(pre_tokenizers())


def words(name, text):
    splits = [Split(Regex(pattern), "isolated") for pattern in pre_tokenizers()[name].patterns]
    return [word for word, _ in Sequence(splits).pre_tokenize_str(text)]


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("aA1234 \n\r\t'sS.,!?$-é日本あ가ا…。\u0301👩<>_"), max_size=60))
def test_no_character_is_lost(text):
    for name in NAMES:
        assert "".join(words(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I've 1234  x", ["I", "'ve", " 1234", " ", " x"]),
        ("smollm", "in 2024!", ["in", " ", "2", "0", "2", "4", "!"]),
        ("starcoder", "v12", ["v", "1", "2"]),
        ("llama-bpe", "12345 I'LL\n\n x", ["123", "45", " I", "'LL", "\n\n", " x"]),
        ("dbrx", "12345", ["123", "45"]),
        ("qwen2", "123 I'LL", ["1", "2", "3", " I", "'LL"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("ufakzeka", "I'll", ["I", "'ll"]),
        ("ufakzeka", "'s", ["'s"]),
        ("seed-coder", "!!\n", ["!!", "\n"]),
        ("laguna", "a \nb", ["a", " ", "\n", "b"]),
        ("minicpm5", "12345", ["123", "45"]),
        ("jais-2", "a" + " " * 6 + "b", ["a", "    ", " ", " b"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("exaone-moe", "ab cd", ["ab cd"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "camelCase 1234 I'll", ["camel", "Case", " ", "123", "4", " I'll"]),
        ("youtu", "ab中文12", ["ab", "中文", "1", "2"]),
        ("deepseek-coder", "a 1\n中", ["a", " ", "1", "\n", "中"]),
        ("deepseek-llm", "éßé 12中!", ["éßé", " ", "12", "中", "!"]),
        # Its punctuation class spans ":" to "~" and with it all ASCII letters, which cuts words of mixed scripts.
        ("deepseek-llm", "Straße", ["Stra", "ß", "e"]),
        ("deepseek-v3", "a 1234中", ["a", " ", "123", "4", "中"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("default", "a$1234", ["a", "$", "123", "4"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("superbpe", "a 1234567", ["a ", "1", "234", "567"]),
        ("chameleon", "a 12.", ["a", " ", "1", "2", "."]),
    ],
)
def test_splits(name, text, expected):
    assert words(name, text) == expected


def test_every_name_has_an_entry():
    assert len(NAMES) >= 60
    assert all(find_pre_tokenizer(name) is pre_tokenizers()[name] for name in NAMES)
    assert find_pre_tokenizer("llama3").ignore_merges and find_pre_tokenizer("llama3").add_bos
    assert not find_pre_tokenizer("smaug-bpe").ignore_merges


def test_nearest_names():
    assert nearest("lama-bpe")[0] == "llama-bpe"
    assert nearest("zzzz") == ["gpt-2", "llama-bpe", "qwen2"]
    with pytest.raises(ModelError, match="smollm"):
        find_pre_tokenizer("smolm")
    with pytest.raises(ModelError, match="qwen2"):
        find_pre_tokenizer(None, "qwen2")
