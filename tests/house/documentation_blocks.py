"""The code blocks of README, CONTRIBUTING and docs, and a scratch project in which a YAML block is complete.

Chinese pages are not among them: ``test_translations.py`` compares their blocks with those of the English pages.
"""

import copy
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.config.load import build_config, read_yaml
from rft_platform.config.paths import resolve_paths
from rft_platform.config.schema.buffer import ExploredTaskset
from rft_platform.config.schema.rft_config import RftConfig

REPOSITORY = Path(__file__).resolve().parents[2]
TRANSLATIONS = sorted([*REPOSITORY.glob("*.zh.md"), *(REPOSITORY / "docs").rglob("*.zh.md")])
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page not in TRANSLATIONS]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
_FILE = re.compile(r"^# (?P<name>[\w./-]+\.py)$")
_ROW = re.compile(r"path: (?P<file>[\w./-]+\.jsonl)\s+# (?P<row>\{.*\})$", re.MULTILINE)

_ROW_COUNT = 1000
#: A row that every workflow and judge of the pages can take.
_TASK = {"question": "What is 2+3?", "answer": "5", "level": 1, "seed": 7, "prompt": "What is 2+3?"}
_MESSAGES = [{"role": "user", "content": "What is 2+3?"}]
_ANSWERS = [{"role": "assistant", "content": text} for text in ("5", "6")]
#: Rows of data files that hold no tasks, by the file's name.
_ROWS: dict[str, dict[str, Any]] = {
    "chats.jsonl": {"messages": [*_MESSAGES, _ANSWERS[0]]},
    "corrections.jsonl": {"messages": [*_MESSAGES, _ANSWERS[0]]},
    "demonstrations": {"messages": [*_MESSAGES, _ANSWERS[0]]},  # of imported traces
    "demonstrations.jsonl": {"messages": [*_MESSAGES, _ANSWERS[0]]},
    "train.parquet": {**_TASK, "prompt": _MESSAGES, "data_source": "math", "reward_model": {"ground_truth": "5"}},
    "pairs.jsonl": {"prompt": _MESSAGES, "chosen": [_ANSWERS[0]], "rejected": [_ANSWERS[1]]},
}
#: Files of code that pages name and do not show.
_AGENT = """
async def solve(task, model):
    return (await model.chat([{"role": "user", "content": task["question"]}]))["content"]


async def customer(messages, task):
    return "[DONE]"
"""
_UNSHOWN = ("my_agents.py", "my_users.py", "agent.py")
#: The module of a user of verl.
_REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, without its indentation."""

    page: str  # path in the repository
    line: int  # of the opening fence
    heading: str
    language: str  # empty: none
    title: str  # file name in the opening fence, or in the first line of Python; empty: none
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page in order. Raises ValueError for a fence that is not closed."""
    name, heading, opened, body = str(page.relative_to(REPOSITORY)), "", None, list[str]()
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, start, body = fence, number, []
            elif line.startswith("#"):
                heading = line.lstrip("# ")
        elif fence is not None and not fence["info"]:
            yield _block(name, start, heading, opened, body)
            opened = None
        else:
            body.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"{name}:{start}: the block is not closed")


def _block(page: str, line: int, heading: str, opened: re.Match[str], body: list[str]) -> Block:
    language, _, rest = opened["info"].strip().partition(" ")
    title = re.search(r'title="([^"]*)"', rest)
    named = _FILE.match(body[0]) if body and language == "python" else None
    name = title[1] if title else named["name"] if named else ""
    return Block(page, line, heading, language, name, "\n".join(body) + "\n")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def block(page: str, part: str) -> Block:
    """The only block of ``page`` that contains ``part``."""
    found = [each for each in BLOCKS if each.page == page and part in each.text]
    where = ", ".join(map(str, found)) or "none"
    assert len(found) == 1, f"{page}: expected one block that contains {part!r}, found {where}: name another part of it"
    return found[0]


def settings_of(text: str, folder: Path) -> dict[str, Any] | None:
    """The settings of a YAML block of ``rft.yaml`` or of a taskset, merged into a small project in ``folder``.

    The files, models and environment that the block names are there, or replaced by those of the folder. None: the
    block has other content.
    """
    file = folder / "block.yaml"
    file.write_text(text)
    given = read_yaml(file)
    if given and given.keys() <= ExploredTaskset.model_fields.keys():
        given = {"buffer": {"explorer_input": {"taskset": given}}}
    if not given or not given.keys() <= RftConfig.model_fields.keys():
        return None
    rows = {found["file"]: json.loads(found["row"]) for found in _ROW.finditer(text)}
    _write_code(folder)
    write_model(folder / "model")
    settings = _merged(_project(given), given)
    return resolve_paths(_with_files(settings, folder, rows), folder)


def config_of(text: str, folder: Path) -> RftConfig | None:
    """``settings_of``, validated."""
    settings = settings_of(text, folder)
    return None if settings is None else build_config(settings, "the block in a small project")


def _project(given: dict[str, Any]) -> dict[str, Any]:
    """What a run needs besides ``given``; nothing if ``given`` has a project and a model, and so must be complete."""
    if {"project", "model"} <= given.keys():
        return {}
    base: dict[str, Any] = {
        "project": "page",
        "name": "block",
        "model": {"model_path": "model", "max_model_len": 4096, "max_response_tokens": 64},
        "algorithm": {"repeat_times": 4},
        "buffer": {"batch_size": 8, "total_steps": 2},
        "explorer": {"auxiliary_models": [{"name": name, "model_path": "model"} for name in ("critic", "guest")]},
    }
    if "tasksets" not in given.get("buffer", {}).get("explorer_input", {}):
        base["buffer"]["explorer_input"] = {"taskset": {"path": "tasks.jsonl"}}
    return base


def _merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in given.items():
        both = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = _merged(result[key], value) if both else copy.deepcopy(value)
    return result


def _with_files(node: Any, folder: Path, rows: dict[str, dict[str, Any]], key: str = "") -> Any:
    """Write the data files that the settings name; models and programs elsewhere become those of the folder."""
    if isinstance(node, dict):
        whole = {name: value for name, value in node.items() if name != "subset_name"}  # our folders have no subsets
        return {name: _with_files(value, folder, rows, name) for name, value in whole.items()}
    if isinstance(node, list):
        return [_with_files(value, folder, rows, key) for value in node]
    if not isinstance(node, str):
        return node
    if key.endswith("model_path"):
        return "model"
    if key == "python":
        return sys.executable
    return _data(node, folder, rows) if key == "path" and ":" not in node else node


def _data(name: str, folder: Path, rows: dict[str, dict[str, Any]]) -> str:
    """Write the file, or a folder with splits for the name of a dataset; returns its path."""
    file = Path(name)
    row = rows.get(name) or _ROWS.get(file.name) or _TASK
    text = "".join(json.dumps(row).replace("2+3", f"{number}+3") + "\n" for number in range(_ROW_COUNT))
    if file.suffix == ".jsonl":
        (folder / file.name).write_text(text)
        return str(folder / file.name)
    for split in ("train", "test"):
        (folder / "data" / file.name).mkdir(parents=True, exist_ok=True)
        (folder / "data" / file.name / f"{split}.jsonl").write_text(text)
    return str(folder / "data" / file.name)


def _write_code(folder: Path) -> None:
    for name in _UNSHOWN:
        (folder / name).write_text(_AGENT)
    (folder / "my_rewards.py").write_text(_REWARDS)
    for each in BLOCKS:
        if each.language == "python" and each.title:
            (folder / each.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / each.title).write_text(each.text)


def write_model(folder: Path) -> None:
    """Write what the checks of a configuration read of a model with a large context."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 40960}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    (folder / "model.safetensors").write_text("")
