"""The harness on tasks of a folder."""

from pathlib import Path
from typing import Any


def evaluate(model: Any, tasks: list[str], folder: Path, **options: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **options)
