"""What holds for every recipe of an agent with tools: preparing it twice, lengths of conversations, a shortened run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rft_platform.cli.commands.demo import load_recipe, train_stage
from rft_platform.cli.views.recipe_report import PICTURE, REPORT, write_report
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.recipes.recipe import EMAIL_SEARCH, MATH_AGENT, Recipe
from rft_platform.recipes.report import RecipeReport
from rft_platform.recipes.tool_agent.prepare import DEMONSTRATIONS
from rft_platform.rounds.project.project import Project

AGENTS = (MATH_AGENT, EMAIL_SEARCH)


@pytest.fixture(scope="module", params=AGENTS, ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe."""
    found: Recipe = request.param
    return found


@pytest.fixture(scope="module")
def config_file(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prepared configuration."""
    return recipe.prepare(tmp_path_factory.mktemp("recipe") / recipe.name)


def test_preparing_again_changes_nothing(recipe: Recipe, config_file: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in config_file.parent.rglob("*") if file.is_file()}
    assert recipe.prepare(config_file.parent) == config_file
    assert {file: file.stat().st_mtime_ns for file in config_file.parent.rglob("*") if file.is_file()} == before


def test_demonstrations_fit_the_context_of_the_model(config_file: Path) -> None:
    from transformers import AutoTokenizer

    config = load_config(config_file)
    tokenizer = AutoTokenizer.from_pretrained(config_file.parent / "model")
    rows = [json.loads(line) for line in (config_file.parent / "tasks" / DEMONSTRATIONS).read_text().splitlines()]
    assert config.model.max_model_len is not None
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)) for row in rows[:500]
    ]
    assert sum(length < config.model.max_model_len for length in lengths) > 0.97 * len(lengths), sorted(lengths)[-20:]


def shortened(config_file: Path, folder: Path, start: Path) -> Path:
    """Write the configuration with few tasks and steps into ``folder``; it starts from the model ``start``."""
    content: dict[str, Any] = yaml.safe_load(config_file.read_text())
    tasks = config_file.parent / "tasks"
    explored = content["buffer"]["explorer_input"]
    explored["eval_tasksets"][0] |= {"path": str(folder / "tasks"), "workflow_args": {"max_turns": 2}}
    content["model"]["model_path"] = str(start)
    if content.get("mode") == "train":
        source = content["buffer"]["trainer_input"]["experience_buffer"]
        source["path"] = str(tasks / Path(source["path"]).name)
        content["buffer"] |= {"train_batch_size": 4, "total_steps": 2}
        content["algorithm"]["optimizer"]["lr_warmup_steps"] = 1
    else:
        explored["taskset"] |= {"path": str(folder / "tasks"), "workflow_args": {"max_turns": 2}}
        content["buffer"] |= {"batch_size": 4, "train_batch_size": 16, "total_steps": 1}
    if "warm_start" in content:
        content["warm_start"] |= {"path": str(tasks / DEMONSTRATIONS), "steps": 2, "batch_size": 8, "stop_at": None}
    config = folder / config_file.name
    config.write_text(yaml.safe_dump(content))
    return config


@pytest.mark.slow
def test_a_shortened_run_ends_with_its_report(recipe: Recipe, config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    for name, lines in (("train", 8), ("test", 6)):
        few = (config_file.parent / "tasks" / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        (tmp_path / "tasks" / f"{name}.jsonl").write_text("".join(few))
    home, start, console = Home(tmp_path / "home"), config_file.parent / "model", Console()
    for stage, root in zip(recipe.stages, recipe.stage_homes(home.root), strict=True):
        config = load_recipe(shortened(config_file.with_name(f"{stage}.yaml"), tmp_path, start), 3)
        train_stage(config, root, console)
        began = time.monotonic()
        train_stage(config, root, console)  # it is complete
        assert time.monotonic() - began < 5
        start = root / "checkpoints" / config.project / stage / "global_step_2"
        assert (start / "model.safetensors").exists()
    config_file = shortened(config_file, tmp_path, start)
    environment = {**os.environ, "RFT_HOME": str(tmp_path / "home")}
    rft = [sys.executable, "-m", "rft_platform"]
    try:
        subprocess.run([*rft, "run", "--config", str(config_file)], env=environment, check=True)
        report = write_report(Project.open(home), recipe, tmp_path / "report.json")
    finally:
        subprocess.run([*rft, "stop"], env=environment, check=True)
    assert report is not None and report.held_out_tasks == 6
    assert report.stages == ([*recipe.stages, "rounds"] if recipe.stages else ["before", "after"])
    assert [curve.figure for curve in report.curves] == list(recipe.figures)
    assert [[value.round for value in curve.values] for curve in report.curves] == [[0, 1]] * len(recipe.figures)
    for curve in report.curves:
        assert len(curve.ends) == len(report.stages)
        assert curve.ends[0].low <= curve.ends[0].mean <= curve.ends[0].high
    page = (home.root / REPORT).read_text()
    assert all(f"| {figure.label} | " in page for figure in recipe.figures) and report.before[0].task_id in page
    assert (home.root / PICTURE).read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["curves"][0]["figure"]["label"] == recipe.figures[0].label and written["cpu_s"] > 0
    assert RecipeReport.from_json(written).to_json() == json.loads(json.dumps(report.to_json()))
