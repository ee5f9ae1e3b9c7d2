"""Chat templates: jinja2 with what models' templates rely on, as Hugging Face `transformers` provides it
(`transformers/utils/chat_template_utils.py`), in the bounded sandbox."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from batchgen.errors import ModelError, RowError
from batchgen.text.sandbox import BoundedEnvironment, Bounds, BoundsError


class ChatTemplate:
    """A model's chat template, compiled once; may be rendered from several threads.

    bos_token, eos_token: None leaves the variable undefined in the template. now: what `strftime_now` formats.
    Raises ModelError when the template is no valid jinja2.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        now: Callable[[], datetime] = datetime.now,
        bounds: Bounds | None = None,
    ):
        self.source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        self._environment = _environment(now, bounds or Bounds())
        try:
            self._template = self._environment.compile_bounded(self._environment.parse_bounded(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid, line {error.lineno}: {error.message}") from None
        except BoundsError as error:
            raise ModelError(f"the model's chat template is {error}") from None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises RowError("template_error") when the template refuses the messages or fails."""
        values = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            return self._environment.render_bounded(self._template, values)
        except Exception as error:  # a template can raise anything
            reason = str(error) or type(error).__name__
            raise RowError("template_error", f"the chat template cannot render these messages: {reason}") from None


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime], bounds: Bounds) -> BoundedEnvironment:
    environment = BoundedEnvironment(bounds, trim_blocks=True, lstrip_blocks=True)
    environment.add_extension(_Generation)
    environment.add_filters({"tojson": to_json})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escapes (jinja2's own filter adds them), characters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
