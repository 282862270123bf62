"""What holds for every recipe: its project can be planned, its tasks are the same, it uses public modules only."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.cli.commands.demo import prepare, train_stages
from rft_platform.cli.views.demo_summary import PICTURE, REPORT, write_report
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import load_config, load_config_of
from rft_platform.online.project import open_project
from rft_platform.recipes.recipe import PROJECTS, recipe_named, recipes
from rft_platform.recipes.report import RecipeReport, report_of
from rft_platform.run.checks import check_run

pytestmark = pytest.mark.timeout(300)  # writing a project takes seconds on a quiet core
RFT = [sys.executable, "-m", "rft_platform"]
AGENTS = ("math-agent", "email-search", "werewolf")
DEMONSTRATIONS = "demonstrations.jsonl"
#: Digests of the tasks, demonstrations and corrections, in the order of their names.
TASKS = {
    "arithmetic": "75c86014c7c2d0a80a88a4d39ad344755dd27e6294d325284718a85bf010b251",
    "email-search": "ab6d4fb7017435d9b482c53963f62c34c38407b1d1dee3478da63e3f9a261c3e",
    "front-desk": "80798677a8af18e7d051b2ef3922e7d8f824f5a290d273e758fb7051ef37e798",
    "math-agent": "4333fe79b836b19a30c5dd981da322abf703ca9a25c67c675bca280629bde92a",
    "werewolf": "131424604e36cdbb5d3394f11f12c9aeb6ce267146d11e71ee7a4ebbe6970b0e",
}
#: The project of the demo is written in every run of the quick tests; each takes seconds.
WRITTEN = [pytest.param(name, marks=[] if name == "arithmetic" else pytest.mark.slow) for name in recipes()]
FIRST = {"email-search": "sft.yaml"}  # of several trainings; each needs the checkpoint of the one before
#: What projects may import; pages of docs show the modules.
PUBLIC = {
    "rft_platform.recipes.tiny_model",
    "rft_platform.rollout.environments.interface",
    "rft_platform.rollout.workflow",
    "rft_platform.rollout.workflows.calculator",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_dry_run_of_a_new_project_passes(name: str, project: Callable[[str], Path], tmp_path: Path) -> None:
    folder = project(name)
    config = load_config(folder / FIRST.get(name, "rft.yaml"))
    plan = check_run(Home(tmp_path / "home"), config, dry=True, service=config.online)
    assert all(finding.level != "error" for finding in plan.findings)
    assert {"README.md", "prepare.py", "rft.schema.json"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "recipe.yaml").exists() and not list(folder.rglob("__pycache__"))


@pytest.mark.parametrize("name", WRITTEN)
def test_tasks_are_the_same_every_time(name: str, project: Callable[[str], Path]) -> None:
    found = b"".join(file.read_bytes() for file in sorted(project(name).glob("*/*.jsonl")))
    assert hashlib.sha256(found).hexdigest() == TASKS[name]


@pytest.mark.parametrize("name", recipes())
def test_a_project_imports_public_modules_and_its_own_files(name: str) -> None:
    files = list((PROJECTS / name).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module.startswith("rft_platform")} <= PUBLIC
    assert not {file.stem for file in files} & sys.stdlib_module_names


def test_public_modules_are_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (PROJECTS.parents[2] / "docs").glob("*.md"))
    assert [module for module in PUBLIC if module not in pages] == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already: name a new folder"):
        recipe_named("arithmetic").write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_fails_leaves_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('this is no torch')")
    with pytest.raises(UserError, match=r"prepare\.py of the recipe arithmetic ended with code 1: .*this is no torch"):
        recipe_named("arithmetic").write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_only_recipes_with_figures_are_trained() -> None:
    assert recipe_named("front-desk").figures == ()
    with pytest.raises(UserError, match="recipe 'front-desk': expected one of arithmetic, email-search, math-agent"):
        recipe_named("front-desk", trained=True)
    published = [figure.published for figure in recipe_named("math-agent", trained=True).figures]
    assert published == [[0.75, 0.85], [8.5, 6.2], [0.60, 0.92]]


@pytest.mark.slow
def test_a_project_that_its_user_changed_is_continued(tmp_path: Path) -> None:
    home, recipe = Home(tmp_path / "home"), recipe_named("arithmetic")
    file = home.root / "arithmetic" / "rft.yaml"
    assert prepare(home, recipe, "demo", 3) == 3
    changed = file.read_text().replace("total_steps: 40", "total_steps: 2")
    file.write_text(changed)
    assert prepare(home, recipe, "demo", None) is None, "no configuration is in force yet"
    assert file.read_text() == changed


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_demonstrations_fit_the_context_of_the_model(name: str, project: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    folder = project(name)
    config = load_config(folder / "rft.yaml")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "tasks" / DEMONSTRATIONS).read_text().splitlines()]
    assert config.model.max_model_len is not None
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False))
        for row in rows[:500]
    ]
    assert sum(length < config.model.max_model_len for length in lengths) > 0.97 * len(lengths), sorted(lengths)[-20:]


def test_a_written_task_is_an_addition(project: Callable[[str], Path]) -> None:
    row = json.loads((project("arithmetic") / "tasks" / "test.jsonl").read_text().splitlines()[0])
    a, b = row["question"].removesuffix("=?").split("+")
    assert int(a) + int(b) == int(row["answer"])


def shortened(config_file: Path, folder: Path, start: Path) -> Path:
    """Write the configuration with few tasks and steps into ``folder``; it starts from the model ``start``."""
    content: dict[str, Any] = yaml.safe_load(config_file.read_text())
    tasks = config_file.parent / "tasks"
    explored = content["buffer"].get("explorer_input", {})
    new = {"path": str(folder / "tasks"), "workflow_args": {"max_turns": 2}}
    for taskset in (*explored.get("eval_tasksets", ()), *([explored["taskset"]] if "taskset" in explored else ())):
        if ".py:" in taskset.get("workflow", ""):
            new["workflow"] = f"{config_file.parent}/{taskset['workflow'].rpartition('/')[2]}"
        taskset |= new
    content["model"]["model_path"] = str(start)
    if content.get("mode") == "train":
        source = content["buffer"]["trainer_input"]["experience_buffer"]
        source["path"] = str(tasks / Path(source["path"]).name)
        content["buffer"] |= {"train_batch_size": 4, "total_steps": 2}
        content["algorithm"]["optimizer"]["lr_warmup_steps"] = 1
    else:
        content["buffer"] |= {"batch_size": 4, "train_batch_size": 16, "total_steps": 1}
    if "warm_start" in content:
        content["warm_start"] |= {"path": str(tasks / DEMONSTRATIONS), "steps": 2, "batch_size": 8, "stop_at": None}
    config = folder / config_file.name
    config.write_text(yaml.safe_dump(content))
    return config


def few_tasks(folder: Path, target: Path) -> None:
    """Write the first tasks of a project."""
    target.mkdir()
    for name, lines in (("train", 8), ("test", 6)):
        few = (folder / "tasks" / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        (target / f"{name}.jsonl").write_text("".join(few))


def run(home: Home, config: Path) -> None:
    """Run a project to its end and stop its processes."""
    environment = {**os.environ, "RFT_HOME": str(home.root)}
    try:
        subprocess.run([*RFT, "run", "--config", str(config)], env=environment, check=True)
    finally:
        subprocess.run([*RFT, "stop"], env=environment, check=True)


@pytest.mark.slow
def test_a_shortened_run_ends_with_its_report(project: Callable[[str], Path], tmp_path: Path) -> None:
    folder, recipe, home = project("math-agent"), recipe_named("math-agent"), Home(tmp_path / "home")
    few_tasks(folder, tmp_path / "tasks")
    run(home, shortened(folder / "rft.yaml", tmp_path, folder / "model"))
    report = write_report(open_project(home), recipe, tmp_path / "report.json")
    assert report is not None and report.held_out_tasks == 6
    assert [curve.figure for curve in report.curves] == list(recipe.figures)
    assert [[value.round for value in curve.values] for curve in report.curves] == [[0, 1]] * len(recipe.figures)
    assert all(curve.ends[0].low <= curve.ends[0].mean <= curve.ends[0].high for curve in report.curves)
    page = (home.root / REPORT).read_text()
    assert all(f"| {figure.label} | " in page for figure in recipe.figures) and report.before[0].task_id in page
    assert (home.root / PICTURE).read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["curves"][0]["figure"]["label"] == recipe.figures[0].label and written["cpu_s"] > 0
    assert RecipeReport.from_json(written).to_json() == json.loads(json.dumps(report.to_json()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_with_stages_trains_and_reports_each(project: Callable[[str], Path], tmp_path: Path) -> None:
    source, home, recipe = project("email-search"), Home(tmp_path / "home"), recipe_named("email-search")
    folder = home.root / recipe.name
    folder.mkdir(parents=True)
    few_tasks(source, folder / "tasks")
    start = source / "model"
    for stage in recipe.stages:
        shortened(source / f"{stage}.yaml", folder, start)
        checkpoints = recipe.stage_home(home.root, stage) / "checkpoints"
        start = checkpoints / "email-search" / stage / "global_step_2"
    train_stages(home, recipe, 7, None)
    assert (start / "model.safetensors").exists()
    train_stages(home, recipe, 7, None)  # complete stages are kept
    assert all(load_config_of(Home(recipe.stage_home(home.root, stage))).seed == 7 for stage in recipe.stages)
    run(home, shortened(source / "rft.yaml", folder, start))
    report = write_report(open_project(home), recipe, tmp_path / "report.json")
    assert report is not None and report.ends == ["SFT", "DPO", "RL"]
    assert [[value.round for value in curve.values] for curve in report.curves] == [[-1, 0, 1]] * len(recipe.figures)
    page = (home.root / REPORT).read_text()
    assert "| figure | SFT | DPO | RL | change | published SFT | DPO | RL | change |" in page
    written = json.loads((tmp_path / "report.json").read_text())
    assert RecipeReport.from_json(written).to_json() == json.loads(json.dumps(report.to_json()))


@pytest.mark.slow
def test_wolves_learn_and_a_village_learns_against_frozen_ones(project: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "werewolf"
    shutil.copytree(project("werewolf"), folder)
    few_tasks(project("werewolf"), folder / "few")
    for name in ("rft", "village"):
        file = folder / f"{name}.yaml"
        content: dict[str, Any] = yaml.safe_load(file.read_text())
        content["buffer"] |= {"batch_size": 2, "train_batch_size": 16, "total_steps": 1}
        content["algorithm"]["repeat_times"] = 2
        for taskset in (
            content["buffer"]["explorer_input"]["taskset"],
            *content["buffer"]["explorer_input"]["eval_tasksets"],
        ):
            taskset["path"] = "few"
        for model in (content["model"], *content.get("policies", ())):
            model["model_path"] = "model"
        if "warm_start" in content:
            content["warm_start"] |= {"steps": 2, "eval_every": 2}
        file.write_text(yaml.safe_dump(content))
        home = Home(tmp_path / name)
        run(home, file)
        opened = open_project(home)
        assert list(opened.store.rounds()) == [0, 1]
        # Untrained weights often talk beyond their context: such a run of the village has no figures.
        report = report_of(opened, recipe_named("werewolf"))
        assert report is not None and report.held_out_tasks == 6
