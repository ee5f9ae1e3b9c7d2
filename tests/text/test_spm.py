"""SPM encoding against a plain statement of the algorithm, on small vocabularies whose scores tie."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.text.tokenizer import Tokenizer

LETTERS = "▁abc"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = st.lists(st.text(LETTERS, min_size=2, max_size=4), unique=True, max_size=25)


def vocabulary(pieces, scores, known_letters):
    letters = list(LETTERS[:known_letters])
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *letters, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(pieces))]
    values = [0.0] * (259 + len(letters)) + [float(score) for score in scores]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": values,
        "tokenizer.ggml.add_space_prefix": False,
    }


def expected_ids(metadata, text):
    """Joins the neighbours that make the best-scored token, the leftmost of equals, as long as there are any; what is
    no token in the end becomes its bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if i >= 259}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(i, symbols[i] + symbols[i + 1]) for i in range(len(symbols) - 1)]
        known = [(-scores[ids[pair]], i, pair) for i, pair in pairs if pair in ids]
        if not known:
            break
        _, i, pair = min(known)
        symbols[i : i + 2] = [pair]
    return [i for symbol in symbols for i in ([ids[symbol]] if symbol in ids else [3 + b for b in symbol.encode()])]


@settings(max_examples=200, deadline=None)
@given(st.data(), PIECES, st.integers(2, 4))
def test_spm_joins_the_best_pair_first(data, pieces, known_letters):
    scores = data.draw(st.lists(st.integers(-3, -1), min_size=len(pieces), max_size=len(pieces)))
    metadata = vocabulary(pieces, scores, known_letters)
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in data.draw(st.lists(st.text("abc é", max_size=30), min_size=1, max_size=5)):
        ids = tokenizer.encode_batch([text], parse_special=False, add_bos=False)[0].tolist()
        assert ids == expected_ids(metadata, text)
        assert tokenizer.decode(ids) == text


def test_defaults_of_the_kind():
    tokenizer = Tokenizer.from_gguf(vocabulary([], [], 4))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.add_bos and tokenizer.eos_token_ids == {2}
    assert tokenizer.encode_batch(["a"], parse_special=False)[0].tolist() == [1, 260]


def test_user_defined_tokens_match_raw_text():
    metadata = vocabulary(["ab"], [-1], 4)
    metadata["tokenizer.ggml.tokens"].append("  ")
    metadata["tokenizer.ggml.token_type"].append(4)
    metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_batch(["ab  ab"], parse_special=False, add_bos=False)[0].tolist() == [263, 264, 263]
    assert tokenizer.decode([263, 264, 263]) == "ab  ab"
