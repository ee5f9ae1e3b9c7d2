"""Prefixes that outlive a job: how its spec becomes tiers, and jobs on the real model that find them on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from batchgen import prefix_cache
from batchgen.engine.cache_tiers import CacheTiers
from batchgen.errors import SpecError
from batchgen.prefix_cache import code_hash, open_tiers
from batchgen.progress import SilentProgress
from batchgen.runner import run_job
from batchgen.spec import CacheSpec, JobSpec
from tests.test_job import answers, job, results

PAGE_BYTES = 64
NUMERICS = {"model": "a" * 64, "kernel": "portable", "fused_multiply_add": True, "weights": "fp32", "kv_dtype": "fp32"}
PROMPT = np.arange(100, dtype=np.int32)


class Device:
    """As much of a backend as tiers look at."""

    def __init__(self, host_memory: bool = True, kv_layout: str = "vectors"):
        self.host_memory, self.kv_layout = host_memory, kv_layout

    def read_page(self, page: int) -> np.ndarray:
        return np.full(PAGE_BYTES, page, np.uint8)


def open_some(directory: Path, device: Device | None = None, messages: list[str] | None = None, **changes: Any) -> Any:
    numerics = {name: changes.get(name, value) for name, value in NUMERICS.items()}
    cache = CacheSpec(**{"disk_path": str(directory), **changes.get("cache", {})})
    told = [] if messages is None else messages
    sizes = changes.get("page_size", 32), changes.get("page_bytes", PAGE_BYTES)
    return open_tiers(cache, device or Device(), numerics, *sizes, told.append)  # type: ignore[arg-type]


def save(tiers: CacheTiers) -> None:
    tiers.computed(PROMPT, 0, [1, 2, 3])
    tiers.close()


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "b" * 64},
    "kernel": {"kernel": "amx_bf16"},
    "fused multiply-add": {"fused_multiply_add": False},
    "weights": {"weights": "bf16 or native"},
    "KV type": {"kv_dtype": "bf16"},
    "page size": {"page_size": 64},
    "bytes of a page": {"page_bytes": PAGE_BYTES - 1},
    "layout": {"device": Device(kv_layout="tiles")},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_page_is_found_by_jobs_of_the_same_numerics_alone(tmp_path, change):
    save(open_some(tmp_path))
    assert len(open_some(tmp_path).restorable(PROMPT, 0, 3)) == 3
    other = open_some(tmp_path, **change)
    assert other.restorable(PROMPT, 0, 1) == [] and other.counts["damaged_pages"] == 0


def test_a_page_of_other_code_is_not_found(tmp_path, monkeypatch):
    save(open_some(tmp_path))
    monkeypatch.setattr(prefix_cache, "code_hash", lambda: "0" * 64)
    assert open_some(tmp_path).restorable(PROMPT, 0, 3) == []


def test_the_hash_of_the_code_sees_every_file(tmp_path, monkeypatch):
    files = {"a.py": "x", "kernels/b.py": "y", "kernels/cpu/c.py": "z"}
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(prefix_cache.batchgen, "__file__", str(tmp_path / "__init__.py"))
    seen = {code_hash()}
    for name in files:
        (tmp_path / name).write_text("w")
        seen.add(code_hash())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len(seen | {code_hash()}) == 5


def test_without_a_tier_there_is_nothing(tmp_path):
    for cache in ({"disk_path": None}, {"disk_path": None, "write": "off"}):
        assert open_some(tmp_path, cache=cache) is None


def test_host_memory_is_a_tier_where_the_device_has_its_own(tmp_path):
    cache, messages = {"host_bytes": 3 * PAGE_BYTES, "disk_path": None}, []
    tiers = open_some(tmp_path, Device(host_memory=False), messages, cache=cache)
    save(tiers)
    assert len(tiers.restorable(PROMPT, 0, 3)) == 3 and messages == []
    assert list(tmp_path.iterdir()) == []


def test_host_memory_is_no_tier_below_host_memory(tmp_path):
    messages: list[str] = []
    assert open_some(tmp_path, messages=messages, cache={"host_bytes": 1, "disk_path": None}) is None
    assert messages == [
        "engine.cache.host_bytes: the KV cache lies in host memory already, so there is no tier in between"
    ]
    assert open_some(tmp_path, messages=messages, cache={"host_bytes": 1}) is not None


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        ({"disk_bytes": 95}, "engine.cache.disk_bytes: 95 bytes is less than one page of this model, 96 bytes"),
        ({"host_bytes": "63B"}, "engine.cache.host_bytes: 63 bytes is less than one page of this model, 64 bytes"),
    ],
)
def test_a_tier_holds_a_page_at_least(tmp_path, cache, problem):
    with pytest.raises(SpecError) as error:
        open_some(tmp_path, Device(host_memory=False), cache=cache)
    assert str(error.value) == problem


@pytest.mark.parametrize(("write", "pages"), [("auto", 3), ("back", 3), ("through", 3), ("off", 0)])
def test_what_is_not_to_be_saved_is_not_saved(tmp_path, write, pages):
    save(open_some(tmp_path, cache={"write": write}))
    assert len(open_some(tmp_path).restorable(PROMPT, 0, 3)) == pages


# Jobs

HEADER = "You decide whether a claim about the weather is true. Answer with yes or no, and say why. " * 20
TAILS = [["Rain is wet.", "Snow is warm.", "Fog is water.", "Wind is air."], ["Hail is ice.", "Rain is dry.", "Sun."]]


@pytest.fixture
def spec_of(make_spec, tmp_path) -> Callable[..., JobSpec]:
    """`spec_of("name", tails, engine)`: rows that begin with the same header of some 400 tokens."""

    def spec_of(name: str, tails: list[str], **engine: Any) -> JobSpec:
        pl.DataFrame({"q": [HEADER + tail for tail in tails]}).write_parquet(tmp_path / f"{name}.parquet")
        given = {"path": str(tmp_path / f"{name}.parquet"), "prompt": "{{ q }}", "chat": False}
        return make_spec(name, input=given, sampling={"max_tokens": 6}, engine=engine)

    return spec_of


def computed(spec: JobSpec) -> tuple[int, int]:
    """Prompt tokens computed, and restored; together those that are distinct."""
    record = job(spec)
    totals, distinct = record["totals"], record["plan"]["distinct_prompt_tokens"]
    assert totals["computed_prompt_tokens"] + totals["restored_prompt_tokens"] >= distinct
    own = totals["prompt_tokens"] - results(spec)["num_cached_tokens"].sum()
    assert own == totals["computed_prompt_tokens"]
    return totals["computed_prompt_tokens"], totals["restored_prompt_tokens"]


SETTINGS: dict[str, dict[str, Any]] = {
    "back": {},
    "through, read ahead": {"cache": {"write": "through", "prefetch": True, "restore_wait_ms": 10_000}},
    "at once": {"cache": {"async_backup": False}},
    "int8, large pages": {"kv_dtype": "int8", "page_size": 64},
    "small steps": {"max_batch_tokens": 50, "cache": {"write": "through"}},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_second_job_starts_from_disk_with_the_same_bits(spec_of, run, tmp_path, setting):
    cache = {"disk_path": str(tmp_path / "kv"), **setting.get("cache", {})}
    plain = spec_of("plain", TAILS[1], **{**setting, "cache": {}})
    first, second = (spec_of(f"job-{n}", TAILS[n], **{**setting, "cache": cache}) for n in range(2))
    for spec in (plain, first, second):
        run(spec)
    assert answers(second) == answers(plain)
    (all_of_it, none), (rest, restored) = computed(plain), computed(second)
    assert (none, computed(first)[1], job(plain)["cache"]) == (0, 0, None)
    assert rest == all_of_it - restored
    page = setting.get("page_size", 32)
    shared = sorted(results(plain)["num_cached_tokens"].to_list())[1]  # what rows but the first found computed
    assert restored == shared // page * page >= 300
    assert job(first)["cache"]["saved_pages"] == job(second)["cache"]["restored_pages"] == restored // page
    assert job(second)["cache"]["saved_pages"] == job(second)["cache"]["damaged_pages"] == 0


@pytest.mark.parametrize("place", [0, 40, -1], ids=["checksum", "content", "end"])
def test_a_flipped_bit_costs_tokens_and_nothing_else(spec_of, run, tmp_path, place):
    engine = {"cache": {"disk_path": str(tmp_path / "kv"), "write": "through"}}
    first, second, third = (spec_of(f"job-{n}", TAILS[0], **engine) for n in range(3))
    run(first)
    blobs = sorted((tmp_path / "kv").rglob("*.blob"), key=lambda path: path.stat().st_mtime_ns)
    damaged = blobs[len(blobs) // 2]
    content = bytearray(damaged.read_bytes())
    content[place] ^= 4
    damaged.write_bytes(content)
    run(second), run(third)
    assert answers(first) == answers(second) == answers(third)
    assert [job(spec)["cache"]["damaged_pages"] for spec in (first, second, third)] == [0, 1, 0]
    assert computed(third)[0] < computed(second)[0] < computed(first)[0]
    assert job(second)["cache"]["saved_pages"] == 1


def test_a_job_goes_on_where_it_stopped_with_what_it_had_saved(spec_of, run, tmp_path):
    engine = {"cache": {"disk_path": str(tmp_path / "kv")}, "max_num_seqs": 1}
    spec, plain = spec_of("job", TAILS[0], **engine), spec_of("plain", TAILS[0])
    calls = iter(range(10**6))
    assert run(spec, stop=lambda: next(calls) > 8).interrupted
    run(spec), run(plain)
    assert answers(spec) == answers(plain)
    assert job(spec)["totals"]["restored_prompt_tokens"] >= 300
    without = spec_of("job", TAILS[0])
    assert run(without).already_done  # where prefixes are kept does not make it another job


def test_a_full_disk_is_told_of_and_stops_nothing(spec_of, tmp_path, monkeypatch):
    """The job's own output is written elsewhere, where there is room."""
    (tmp_path / "kv").write_text("a file, and no place for a folder")
    told: list[str] = []

    class Listener(SilentProgress):
        def message(self, text: str) -> None:
            told.append(text)

    spec, plain = spec_of("job", TAILS[0], cache={"disk_path": str(tmp_path / "kv")}), spec_of("plain", TAILS[0])
    for each in (spec, plain):
        run_job(each, fresh=False, progress=Listener(), stop=lambda: False)
    assert answers(spec) == answers(plain)
    saving = [text for text in told if "cannot be saved" in text]
    assert len(saving) == 1 and str(tmp_path / "kv") in saving[0]
