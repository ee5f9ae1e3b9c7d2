"""task: embed. Against the numpy reference, and the same bits whatever the batch; against transformers as a peer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from batchgen.errors import OutputError, SpecError
from batchgen.io.delivered import DeliveredJob
from batchgen.job_plan import plan_job
from batchgen.kernels.reference import causal_attention, rms_norm, rotate, swiglu
from batchgen.loading import ModelFile, open_model
from batchgen.progress import SilentProgress
from batchgen.report.page import write_report
from batchgen.runner import run_job
from batchgen.spec import JobSpec, load_spec
from batchgen.yaml_text import write_yaml
from tests.conftest import ROOT
from tests.gguf_bytes import tiny_gguf

TEXTS = ["hello, world", "hello, world: what is shared", "hello", "hello, world", "x" * 90, "another one"]


def hidden_states(model: ModelFile, tokens: np.ndarray) -> np.ndarray:
    """(tokens, hidden size): the whole model in a dozen lines, by the reference's own functions, without a cache."""
    config, s = model.config, model.config.shape
    x = model.dequantize("token_embd.weight")[tokens]
    cos, sin = (tables[0] for tables in config.rope_tables(len(tokens)))
    heads = {"q": s.num_heads, "k": s.num_kv_heads, "v": s.num_kv_heads}
    for i in range(s.num_layers):
        w = {name: weight(model, f"blk.{i}.{name}") for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")}
        normed = rms_norm(x, w["attn_norm"], config.norm_eps)
        q, k, v = (
            (normed @ unpaired(model, f"blk.{i}.attn_{name}", count).T).reshape(-1, count, s.head_dim)
            for name, count in heads.items()
        )
        attended = causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v).reshape(len(x), -1)
        x = x + attended @ w["attn_output"].T
        normed = rms_norm(x, w["ffn_norm"], config.norm_eps)
        gate, up = (normed @ weight(model, f"blk.{i}.ffn_{name}").T for name in ("gate", "up"))
        x = x + swiglu(gate, up) @ w["ffn_down"].T
    return rms_norm(x, model.dequantize("output_norm.weight"), config.norm_eps)


def weight(model: ModelFile, name: str) -> np.ndarray:
    return model.dequantize(f"{name}.weight")


def unpaired(model: ModelFile, name: str, heads: int) -> np.ndarray:
    """Rows of q and k, which GGUF files of llamas have as pairs of neighbours, as two halves of each head."""
    values = weight(model, name)
    if name.endswith("_v"):
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def pooled(states: np.ndarray, kind: str, normalize: bool) -> np.ndarray:
    vector = states.mean(axis=0) if kind == "mean" else states[-1]
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf({"llama.context_length": 100}))
    return path


@pytest.fixture
def embed(tiny: Path, tmp_path: Path) -> Callable[..., JobSpec]:
    """`embed(task={...}, engine={...})`: runs a job over `TEXTS` on the tiny model."""

    def embed(name: str = "job", texts: list[Any] = TEXTS, **sections: Any) -> JobSpec:
        pl.DataFrame({"text": texts}).write_parquet(tmp_path / f"{name}.parquet")
        given = {"path": str(tmp_path / f"{name}.parquet"), "prompt": "{{ text }}", **sections.pop("input", {})}
        engine = {"kernel": "reference", **sections.pop("engine", {})}
        task = {"kind": "embed", **sections.pop("task", {})}
        output = {"path": str(tmp_path / name)}
        values = {"model": {"source": str(tiny)}, "input": given, "task": task, "engine": engine, "output": output}
        (tmp_path / f"{name}.yaml").write_text(write_yaml(values | sections), encoding="utf-8")
        spec = load_spec(tmp_path / f"{name}.yaml")
        run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False)
        return spec

    return embed


def vectors(spec: JobSpec) -> np.ndarray:
    return pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")["embedding"].to_numpy()


def totals(spec: JobSpec) -> dict[str, Any]:
    return json.loads((Path(spec.output.path) / "job.json").read_text())["totals"]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_vectors_are_the_pooled_hidden_states(embed, tiny: Path, kind: str, normalize: bool) -> None:
    spec = embed(task={"pooling": kind, "normalize": normalize})
    model = open_model(tiny)
    expected = [
        pooled(hidden_states(model, ids), kind, normalize)
        for ids in model.tokenizer.encode_batch(TEXTS, parse_special=False)
    ]
    np.testing.assert_allclose(vectors(spec), expected, atol=2e-5)
    assert not np.allclose(expected[0], expected[2], atol=1e-3)
    check_plan(spec, shares=kind == "last")


def check_plan(spec: JobSpec, shares: bool) -> None:
    figures, found = plan_job(spec, SilentProgress()).figures, totals(spec)
    assert figures.computed_prompt_tokens == found["computed_prompt_tokens"] == figures.distinct_prompt_tokens
    assert figures.prompt_tokens == found["prompt_tokens"] and found["generated_tokens"] == 0
    frame = pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")
    assert found["prompt_tokens"] - frame["num_cached_tokens"].sum() == found["computed_prompt_tokens"]
    lengths, once = frame["num_prompt_tokens"], frame["num_prompt_tokens"][3]  # the fourth row is the first again
    assert (found["computed_prompt_tokens"] < lengths.sum() - once) == shares
    assert found["computed_prompt_tokens"] <= lengths.sum() - once


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize(
    "engine",
    [{"max_batch_tokens": 7}, {"max_num_seqs": 1, "max_batch_tokens": 64}, {"prefix_sharing": False}, {"threads": 1}],
    ids=["chunks", "one by one", "without sharing", "one thread"],
)
def test_the_bits_do_not_depend_on_the_batch(embed, kind: str, engine: dict[str, Any]) -> None:
    task, kernel = {"pooling": kind, "normalize": False}, {"kernel": "portable"}
    usual, other = embed("usual", task=task, engine=kernel), embed("other", task=task, engine=kernel | engine)
    assert vectors(usual).tobytes() == vectors(other).tobytes()


def test_more_hidden_states_than_sequences_are_taken_in_a_step(embed) -> None:
    """The bound on logits is none on these: a prompt of 90 tokens goes in at once."""
    spec = embed(task={"pooling": "mean"}, engine={"max_num_seqs": 2})
    steps = pl.read_parquet(Path(spec.output.path) / "steps" / "*.parquet")
    assert steps["num_prefill_tokens"].max() >= 90


def test_rows_that_fail_have_no_vector(embed, tmp_path: Path) -> None:
    spec = embed(texts=["hello", None, "", "y" * 101])
    frame = pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")
    assert frame["error"].struct.field("code").to_list() == [
        None,
        "prompt_missing",
        "prompt_missing",
        "prompt_too_long",
    ]
    assert frame["embedding"].is_null().to_list() == [False, True, True, True]
    assert frame["finish_reason"].to_list() == ["stop", "error", "error", "error"]
    cut = embed("cut", ["y" * 101, "y" * 100], input={"overflow": "truncate_right"})
    assert vectors(cut)[0].tobytes() == vectors(cut)[1].tobytes()
    all_failed = embed("failed", [None, None])
    [part] = (Path(all_failed.output.path) / "results").glob("*.parquet")
    assert pq.read_table(part)["embedding"].null_count == 2


def test_the_column_has_a_fixed_size_and_reports_are_made(embed) -> None:
    spec = embed()
    directory = Path(spec.output.path)
    [part] = (directory / "results").glob("*.parquet")
    kind = pq.read_schema(part).field("embedding").type
    assert (kind.list_size, str(kind.value_type)) == (32, "float")
    assert not (directory / "timings").exists()
    assert DeliveredJob.open(directory).results().collect()["num_generated_tokens"].sum() == 0
    assert write_report(directory).path.exists()


def test_a_chat_template_is_used_only_when_it_is_asked_for(embed, tiny: Path) -> None:
    plain, chat = embed("plain", ["hello"]), embed("chat", ["hello"], input={"chat": True})
    tokens = [totals(spec)["prompt_tokens"] for spec in (plain, chat)]
    assert tokens[0] == len(open_model(tiny).tokenizer.encode_batch(["hello"], parse_special=False)[0]) < tokens[1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"pooling": "max"}}, r"task\.pooling"),
        ({"task": {"stride": 3}}, "stride has no meaning with kind: embed"),
        ({"task": {"kind": "generate", "pooling": "mean"}}, "pooling has no meaning with kind: generate"),
        ({"sampling": {"max_tokens": 3}}, "sampling has no meaning"),
    ],
)
def test_what_means_nothing_is_refused(embed, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        embed(**sections)


def test_finished_answers_are_not_kept_for_another_run(embed) -> None:
    spec = embed()
    with pytest.raises(OutputError, match="computed anew"):
        run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False, reuse=True)


def test_the_example_runs(model_path: Path, tmp_path: Path) -> None:
    output = f"output.path={json.dumps(str(tmp_path / 'embed'))}"
    spec = load_spec(ROOT / "jobs" / "embed.yaml", ["input.limit=4", output])
    run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False)
    found = vectors(spec)
    assert found.shape == (4, 576) and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert len(np.unique(found @ found[0])) == 4


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_float32_gives_the_hidden_states_of_transformers(model: ModelFile, tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    path = model.file.path
    output = f"output.path={json.dumps(str(tmp_path / 'embed'))}"
    changes = ["input.limit=3", output, f"task.pooling={kind}", "task.normalize=false", "model.weights=fp32"]
    spec = load_spec(ROOT / "jobs" / "embed.yaml", changes)
    run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False)
    theirs = transformers.AutoModel.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    texts = pl.read_parquet(ROOT / "jobs" / "data" / "humaneval.parquet")["prompt"][:3].to_list()
    for found, ids in zip(vectors(spec), model.tokenizer.encode_batch(texts, parse_special=False), strict=True):
        with torch.no_grad():
            states = theirs(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0].numpy()
        expected = pooled(states, kind, False)
        assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)
