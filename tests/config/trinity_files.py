"""Trinity-RFT's example configurations, with data and models that are on this machine."""

import json
from pathlib import Path
from typing import Any

import yaml

#: Columns that the example configurations read.
_ROW = {
    "question": "What is 2+3?",
    "problem": "What is 2+3?",
    "prompt": "What is 2+3?",
    "answer": "5",
    "solution": "5",
    "ground_truth": "5",
    "gt_answer": "5",
    "reference_answer": "5",
    "reward_model.ground_truth": "5",
    "chosen": "5",
    "rejected": "6",
    "qwen2.5_7b_pass_rate": 0.5,
}


def write_rows(file: Path) -> Path:
    """Tasks, demonstrations and pairs with all columns."""
    rows = [_ROW | {key: f"{number}. {_ROW[key]}" for key in ("question", "problem", "prompt")} for number in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def with_local_files(source: Path, target: Path, model: Path, rows: Path) -> Path:
    """A copy of a configuration whose models and datasets are on this machine; nothing else is changed."""
    data: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
    data["model"]["model_path"] = str(model)
    inputs = data["buffer"].get("explorer_input") or {}
    for taskset in [inputs.get("taskset"), *(inputs.get("eval_tasksets") or [])]:
        if taskset:
            taskset["path"] = str(rows)
    outputs = data["buffer"].get("trainer_input") or {}
    for buffer in [outputs.get("experience_buffer"), *(outputs.get("auxiliary_buffers") or {}).values()]:
        if buffer and buffer.get("storage_type") == "file":
            buffer["path"] = str(rows)
    for entry in (data.get("explorer") or {}).get("auxiliary_models") or []:
        entry["model_path"] = str(model)
    target.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return target
