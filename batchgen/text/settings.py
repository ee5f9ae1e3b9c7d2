"""What the small files beside a Hugging Face tokenizer say of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.io.model_files import read_bytes, read_json


@dataclass(frozen=True)
class TokenizerSettings:
    """`values`: `tokenizer_config.json`, with `chat_template` from `chat_template.jinja` where that file exists, and
    `eos_token_id` from `generation_config.json`, or from `config.json` where that says none."""

    folder: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerSettings":
        """As far as the files exist. Raises ModelError for one that is no JSON object."""
        values = _content(folder / "tokenizer_config.json")
        ends = [_content(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        values["eos_token_id"] = next((ids for ids in ends if ids is not None), None)
        template = folder / "chat_template.jinja"
        if template.exists():
            values["chat_template"] = read_bytes(template).decode("utf-8", "replace")
        return cls(folder, values)

    @property
    def add_bos(self) -> bool | None:
        value = self.values.get("add_bos_token")
        return None if value is None else bool(value)

    def token(self, key: str) -> str | None:
        """The text of the token that is named under `key` (such as "bos_token")."""
        value = self.values.get(key)
        return value.get("content") if isinstance(value, dict) else value

    def listed_ends(self) -> list[int]:
        """The ids of the tokens that end an answer, one or several."""
        listed = self.values["eos_token_id"]
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ModelError(f"{self.folder}: eos_token_id is {listed!r}: one or several token ids are expected")
        return ids

    def chat_template(self) -> str | None:
        """The template; of several named ones, the one called "default"."""
        template = self.values.get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Tokens beside the vocabulary's own: id → (text, whether it is a control token)."""
        listed = self.values.get("added_tokens_decoder") or {}
        return {int(i): (token["content"], bool(token.get("special"))) for i, token in listed.items()}


def _content(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
