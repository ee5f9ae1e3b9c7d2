from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.session import Session
from batchgen.spec import ModelSpec


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness reads local tables through `datasets`, which keeps copies of them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets", raising=False)


@pytest.fixture(scope="session")
def float32_session(model_path: Path) -> Iterator[Session]:
    with Session.open(ModelSpec(source=str(model_path), weights="fp32")) as session:
        yield session
