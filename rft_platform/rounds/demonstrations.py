"""Demonstrations for supervised fine-tuning, as the one Parquet file that the trainer reads."""

from pathlib import Path

from rft_platform.config.algorithm_parts import Experts
from rft_platform.config.trainer import WarmStart
from rft_platform.errors import UserError
from rft_platform.files import atomic_path, digest_file, digest_json


def write_demonstrations(settings: WarmStart | Experts, target: Path, key: str = "warm_start.path") -> str:
    """Write the configured demonstrations to ``target`` (columns prompt, response, system); returns their digest.

    ``key`` is where the configuration names them.

    Raises UserError for a dataset that cannot be read, lacks a column, or holds a row without a response.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rft_platform.tasks.dataset import load_tasks

    dataset = load_tasks(
        settings.path,
        split=settings.split,
        subset_name=settings.subset_name,
        prompt_key=settings.format.prompt_key,
        response_key=settings.format.response_key,
    )
    answers = [task.answer for task in dataset.tasks]
    if None in answers:
        raise UserError(f"{key} {settings.path}: {answers.count(None)} rows have no response to learn from")
    columns = {
        "prompt": pa.array([task.prompt for task in dataset.tasks], pa.string()),
        "response": pa.array(answers, pa.string()),
        "system": pa.array([settings.format.system_prompt] * len(answers), pa.string()),
    }
    with atomic_path(target) as temp:
        pq.write_table(pa.table(columns), temp, compression="zstd")
    return digest_json([dataset.digest, digest_file(target)])
