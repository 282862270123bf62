"""Random changes of real configurations: the dry run plans them, or refuses in plain lines with exit code 2.

``RFT_MUTATIONS`` sets how many are tried (default 60), ``RFT_MUTATIONS_SEED`` where they start.
"""

import copy
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from rft_platform.cli.exits import error_lines
from rft_platform.common.errors import UserError
from rft_platform.config.dry_run import render_plan
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run.checks import check_run

REPOSITORY = Path(__file__).resolve().parents[2]
COUNT, SEED = int(os.environ.get("RFT_MUTATIONS", "60")), int(os.environ.get("RFT_MUTATIONS_SEED", "0"))

THROUGH_COMMAND = 20  # one of so many goes through the command itself

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 10**12, -(10**30), 0.5, 1e30, 1e-300, float("nan"), float("inf"), "", " ", "x",
    "..", "../../etc", "/", "/nowhere/at/all", "a:b", "train[:3]", "x" * 5000, "ünïcödé", "a\u200bb", "a\nb", "{{ 7 }}",
    "%s", "null", "1e-6", "sk-0123456789abcdef", "http://u:pw@h/v1", "models:/x@champion", "file.py:f", "os:system",
    [], [1], [None], ["a", "b"], {}, {"a": 1}, {"name": "x"}, [{}], [[[]]], {1: 2},
]  # fmt: skip


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a configuration."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from nodes(value)


def mutated_tree(tree: dict[str, Any], dice: random.Random) -> str:
    """The configuration with one to three of its settings replaced, removed, renamed, added or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.randint(1, 3)):
        found = list(nodes(tree))
        if not found:
            break
        container, key = dice.choice(found)
        other, other_key = dice.choice(found)
        match dice.randrange(6):
            case 0 | 1:
                container[key] = copy.deepcopy(dice.choice(VALUES))
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                name = str(key)
                place = dice.randrange(len(name) + 1)
                container[name[:place] + dice.choice("sx_.-é") + name[place + 1 :]] = container.pop(key)
            case 4 if isinstance(container, dict):
                container[dice.choice(["seed", "lr", "path", "name", "kind", "args", "x y", ""])] = dice.choice(VALUES)
            case _:
                container[key] = copy.deepcopy(other[other_key])
    return yaml.safe_dump(tree, allow_unicode=True)


def mutated_text(text: str, dice: random.Random) -> bytes:
    """The file with characters, lines or bytes changed."""
    lines = text.splitlines()
    place = dice.randrange(len(text))
    match dice.randrange(6):
        case 0:
            text = text[:place] + dice.choice("\t{}[]:,&*!|>'\"%@`#\x00é\u2028") + text[place:]
        case 1:
            text = text[:place] + text[place + dice.randint(1, 20) :]
        case 2:
            text = text[:place]
        case 3:
            dice.shuffle(lines)
            text = "\n".join(lines)
        case 4:
            index = dice.randrange(len(lines))
            text = "\n".join([*lines[:index], lines[index], *lines[index:]])
        case _:
            data = bytearray(text.encode())
            data[dice.randrange(len(data))] = dice.randrange(256)
            return bytes(data)
    return text.encode("utf-8", "surrogatepass")


@pytest.fixture
def sources(tmp_path: Path, tiny_model: Path, write_config: Callable[..., Path]) -> list[str]:
    """Texts of real configurations: the examples', that of README, and one that is sound here."""
    for folder in ("data",):
        shutil.copytree(REPOSITORY / "examples" / folder, tmp_path / folder, dirs_exist_ok=True)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model").symlink_to(tiny_model)
    texts = [file.read_text(encoding="utf-8") for file in sorted((REPOSITORY / "examples").glob("*.yaml"))]
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    texts += re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    sound = write_config(model={"model_path": "tiny/model", "max_model_len": 64}).read_text(encoding="utf-8")
    return [*texts, sound, sound]


def by_command(rft: Callable[..., Result], home: Home, file: Path) -> tuple[int, str]:
    """Exit code and output of the dry run, through the command."""
    result = rft("run", "--config", file, "--dry-run")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(file.read_bytes().decode(errors="replace")) from result.exception
    return result.exit_code, result.stderr if result.exit_code else result.stdout


def in_process(rft: Callable[..., Result], home: Home, file: Path) -> tuple[int, str]:
    """The same without building the command anew."""
    try:
        return 0, render_plan(check_run(home, load_config(file), dry=True))
    except UserError as error:
        return 2, "\n".join(error_lines(str(error)))
    except Exception as error:
        raise AssertionError(file.read_bytes().decode(errors="replace")) from error


def test_no_change_of_a_configuration_ends_in_a_traceback(
    home: Home,
    tmp_path: Path,
    sources: list[str],
    rft: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    file, codes = tmp_path / "mutated.yaml", {0: 0, 2: 0}
    for number in range(SEED, SEED + COUNT):
        dice = random.Random(number)
        text = dice.choice(sources)
        content = mutated_text(text, dice) if dice.random() < 0.3 else mutated_tree(yaml.safe_load(text), dice).encode()
        file.write_bytes(content)

        code, printed = (by_command if number % THROUGH_COMMAND == 0 else in_process)(rft, home, file)

        said = f"mutation {number}: exit code {code}\n{printed}\n{content.decode(errors='replace')}"
        assert code in codes, said
        codes[code] += 1
        assert not home.root.exists(), said
        assert "Traceback" not in printed, said
        lines = [line for line in printed.splitlines() if line.strip()]
        assert lines, said
        assert code == 0 or all(line.startswith("error: ") and len(line) < 1100 for line in lines), said
    print(f"{COUNT} mutations from {SEED}: {codes[0]} planned, {codes[2]} refused")
