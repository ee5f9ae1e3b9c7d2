"""Engine tests use pages of a few tokens."""

import pytest

from batchgen.engine import batch


@pytest.fixture(autouse=True)
def runs_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share runs of pages however few tokens they hold."""
    monkeypatch.setattr(batch, "LEAST_SHARED_TOKENS", 0)
