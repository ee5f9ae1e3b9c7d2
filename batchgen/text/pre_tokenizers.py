"""How byte-level BPE models cut text into words before merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).

Each entry is a list of regular expressions (Oniguruma) applied one after the other: every expression splits each piece
of the text into its matches and what lies between them. The names and their meaning are those of llama.cpp
(`src/llama-vocab.cpp`); where llama.cpp approximates the expression of the model's own `tokenizer.json` (its regex
engine has no inline flags and few Unicode classes), the model's own is used.

Left out because they need more than a list of expressions: gemma4, sarvam-moe, granite-embed-multi-311m, whitespace
(no byte encoding), kimi-k2, afmoe, tiny_aya, cohere2moe (special digit or script handling), and encoder-only models.
"""

import difflib
from dataclasses import dataclass
from functools import cache

from batchgen.errors import ModelError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_UFAKZEKA = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_MINICPM5 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
_JAIS2 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _chars(spans: str) -> str:
    """Hexadecimal code points and ranges as the inside of a character class (no literals: editors normalise some)."""
    return "".join("-".join(chr(int(end, 16)) for end in span.split("-")) for span in spans.split())


def _cased(suffix: str, digits: str) -> str:
    """Words split where case changes (tekken, GPT-4o); `suffix` matches a contraction, `digits` a number."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}")
_YOUTU = _cased(f"{_CONTRACTION}?", r"\p{N}")
_HAN = _chars("4E00-9FA5")
_KANA = _chars("3040-309F 30A0-30FF")
_CJK = f"[{_HAN}{_chars('0800-4E00 AC00-D7FF')}]+"
_HANGUL = _chars("AC00-D7A3 3131-318E")
_CJK_PUNCTUATION = _chars("FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F")
_YOUTU_SCRIPTS = f"[{_HANGUL}]+|[{_CJK_PUNCTUATION}]+|[{_chars('3105-312F')}]+|[{_HAN}{_KANA}]+"

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_HAN}{_KANA}]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Letters with case, as of the Unicode version that the DeepSeek tokenizers froze.
_DEEPSEEK_LETTERS = _chars(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    rf"\s?[!-/:-~{_chars('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = rf" ?[^(\s|.,!?{_chars('2026 3002 FF0C 3001 0964 06D4 060C')})]+"
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` are applied in order; `ignore_merges`: a word that is a token stays whole whatever the merges say;
    `add_bos`: what holds when the file does not say whether prompts start with BOS."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def find_pre_tokenizer(name: str | None, hint: str = "") -> PreTokenizer:
    """The entry called `name`. Raises ModelError when the name is missing or unknown.

    hint: what is known of the model (its architecture), to suggest names when there is none to start from.
    """
    table = pre_tokenizers()
    if name is None:
        near = ", ".join(nearest(hint))
        raise ModelError(
            f"the model's tokenizer names no pre-tokenizer (tokenizer.ggml.pre is missing), so its token ids would be "
            f"a guess: name one with model.pre_tokenizer in the spec, for example {near}"
        )
    if name not in table:
        near = ", ".join(nearest(name))
        raise ModelError(
            f"unknown pre-tokenizer '{name}' (tokenizer.ggml.pre); nearest known names: {near}: "
            f"if one of them fits, name it with model.pre_tokenizer in the spec"
        )
    return table[name]


def nearest(name: str) -> list[str]:
    """Up to three known names that look like `name`, else the most usual ones."""
    return difflib.get_close_matches(name, pre_tokenizers(), n=3, cutoff=0.5) or ["gpt-2", "llama-bpe", "qwen2"]


@cache
def pre_tokenizers() -> dict[str, PreTokenizer]:
    """All known entries by name."""
    families = {
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
        ),
        PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
        PreTokenizer((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
        PreTokenizer(_DIGITS_GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((_QWEN2,)): "qwen2 stablelm2 deepseek-r1-qwen megrez kormo hunyuan solar-open grok-2",
        PreTokenizer((_QWEN35,)): "qwen35",
        PreTokenizer((_UFAKZEKA,)): "ufakzeka",
        PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)): "laguna",
        PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True): "minicpm5",
        PreTokenizer((_SEED_CODER,)): "seed-coder",
        PreTokenizer((_JAIS2,)): "jais-2",
        PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((_EXAONE_MOE,)): "exaone-moe",
        PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
        PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True): "youtu",
        PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
        PreTokenizer(_DEEPSEEK_LLM): "deepseek-llm",
        PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer(_FALCON): "falcon",
        PreTokenizer(_DEFAULT): "default",
        PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
        PreTokenizer((_BLOOM, r"\p{N}")): "viking",
        PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
        PreTokenizer(_CHAMELEON, add_bos=True): "chameleon",
    }
    return {name: entry for entry, names in families.items() for name in names.split()}
