"""batchgen beside the harness's own `hf` model in float32, on the same weights: needs lm_eval, torch and transformers.

python -m pytest -m peer tests/integrations
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (pip install 'batchgen[lm-eval]')")
pytest.importorskip("torch", reason="needs torch and transformers")

from batchgen.integrations.lm_eval import BatchgenLM
from batchgen.loading import ModelFile
from tests.integrations.harness import evaluate
from tests.integrations.tasks import write_tasks

pytestmark = pytest.mark.peer

TASKS = ["choices", "answers", "code"]


def hf_model(path: Path, batch_size: int = 4) -> Any:
    """`hf` with the file's weights, expanded to float32, and a tokenizer that takes digits one by one.

    That is what `tokenizer.ggml.pre: smollm` says; transformers' own conversion leaves it out.
    """
    import torch
    from lm_eval.models.huggingface import HFLM
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **file)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **file)
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu", backend="causal")


def test_metrics_and_scores_are_those_of_hf(tmp_path: Path, model: ModelFile, float32_session) -> None:
    write_tasks(tmp_path, 3)
    ours = evaluate(BatchgenLM(float32_session), TASKS, tmp_path)
    theirs = evaluate(hf_model(model.file.path), TASKS, tmp_path)
    for task in TASKS:
        expected = theirs["results"][task]
        near = {name: pytest.approx(value, rel=1e-4) for name, value in expected.items() if isinstance(value, float)}
        assert ours["results"][task] == {**expected, **near}
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert mine["doc_id"] == other["doc_id"]
            _check_answers(task, mine["resps"], other["resps"])


def _check_answers(task: str, mine: list[Any], other: list[Any]) -> None:
    assert len(mine) == len(other) > 0
    for [found], [expected] in zip(mine, other, strict=True):
        if task == "answers":
            assert found == expected
        elif task == "choices":
            assert found[0] == pytest.approx(expected[0], abs=1e-3)
            assert found[1] == expected[1]
        else:
            assert found == pytest.approx(expected, rel=1e-4)
