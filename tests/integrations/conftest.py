from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.session import Session
from batchgen.spec import EngineSpec, ModelSpec
from tests.gguf_bytes import tiny_gguf


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness reads local tables through `datasets`, which keeps copies of them."""
    datasets = pytest.importorskip("datasets", reason="comes with lm-evaluation-harness")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf({"llama.context_length": 1024}))
    return path


@pytest.fixture(scope="session")
def tiny_session(tiny_path: Path) -> Iterator[Session]:
    with Session.open(ModelSpec(source=str(tiny_path)), EngineSpec(kernel="reference")) as session:
        yield session


@pytest.fixture(scope="session")
def float32_session(model_path: Path) -> Iterator[Session]:
    with Session.open(ModelSpec(source=str(model_path), weights="fp32")) as session:
        yield session
