"""Every code block of README, CONTRIBUTING and docs runs: in a named test, or here by its language.

- ``yaml``: the dry run plans it, merged into a small project if it is a part of ``rft.yaml``.
- Shell: the programs of this repository accept each command. ``python``, ``sql``: a test of ``RUN_BY`` runs the block.
- Without a language, ``text``: output or a layout, no commands. ``mermaid``: a diagram.
- A block of a Chinese page is identical to that of the English page (``test_translations.py``).

After a change of a page, the message of a failed test says which block, and what to do.
"""

import inspect
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import dagster as dg
import pytest
import yaml

from rft_platform.common.user_code import load_object
from rft_platform.component import RftProjectComponent
from rft_platform.config.checks import machine
from rft_platform.config.home import Home
from rft_platform.config.reference import EDITOR_LINE
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.buffer import ReplayBuffer
from rft_platform.experience.queries import connect
from rft_platform.experience.selections import TRAINED_ON, write_selection
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.rounds.selection.row_selection import Group, priority_of
from rft_platform.run import checks
from rft_platform.run.model_check import ModelCheck
from rft_platform.servers import ui_servers
from rft_platform.tasks.task import Task
from tests.experience.samples import judged, rollouts
from tests.house.documentation_blocks import BLOCKS, REPOSITORY, Block, block, config_of
from tests.house.documentation_commands import COMMAND, commands_of, problem_of, syntax_error

HERE, RUNS = "tests/house/test_documentation_blocks.py", "tests/e2e/test_documentation_runs.py"
ALGORITHMS, OPERATORS = "tests/algorithms/test_algorithms_doc.py", "tests/judging/test_operators_doc.py"

#: The test that runs a block of Python or SQL: page, a part of the block's text (empty: all of the page), test.
RUN_BY: list[tuple[str, str, str]] = [
    ("README.md", "async def solve", f"{RUNS}::test_workflows"),
    ("docs/algorithms.md", "model.set_env_state", f"{RUNS}::test_workflows"),
    ("docs/algorithms.md", "# my_rft.py", f"{ALGORITHMS}::test_the_plugin_of_the_page_works"),
    ("docs/architecture.md", "def _metrics", f"{HERE}::test_the_declaration_of_a_server"),
    ("docs/checkpoints.md", "AutoModelForCausalLM", f"{RUNS}::test_transformers_loads_a_checkpoint"),
    ("docs/dagster.md", "def rewards_by_task", "tests/e2e/test_downstream.py::shop"),
    ("docs/dagster.md", "rft_platform.load_round(", f"{HERE}::test_queries"),
    ("docs/data.md", "# my_operators.py", f"{OPERATORS}::test_the_operator_of_the_page_works"),
    ("docs/evaluation.md", 'auxiliary_models["critic"]', f"{RUNS}::test_a_judge_asks_an_auxiliary_model"),
    ("docs/judges.md", "async def judge", f"{HERE}::test_judges"),
    ("docs/judges.md", "def best_of_group", f"{HERE}::test_judges"),
    ("docs/migration.md", "from rft_platform.tuner import", f"{HERE}::test_code_of_other_systems"),
    ("docs/migration.md", "from my_rewards import", f"{HERE}::test_code_of_other_systems"),
    ("docs/online.md", "client.chat.completions.create", f"{RUNS}::test_clients_of_the_service"),
    ("docs/online.md", "def redact", f"{HERE}::test_redaction"),
    ("docs/online_clients.md", "with OnlineClient", f"{RUNS}::test_clients_of_the_service"),
    ("docs/online_clients.md", "TrainingRunner(", f"{RUNS}::test_clients_of_the_service"),
    ("docs/policies.md", "# two_players.py", f"{RUNS}::test_workflows"),
    ("docs/recording.md", "get_openai_async_client()", f"{RUNS}::test_workflows"),
    ("docs/recording.md", "create_subprocess_exec", f"{RUNS}::test_workflows"),
    ("docs/store.md", "connection.sql(", f"{HERE}::test_queries"),
    ("docs/synchronisation.md", "SELECT use", f"{HERE}::test_queries"),
    ("docs/synchronisation.md", "def oldest_first", f"{HERE}::test_a_priority"),
    ("docs/tune.md", 'if __name__ == "__main__"', f"{RUNS}::test_tune"),
    ("docs/tune.md", "select_model(", "tests/tuner/test_model_selection.py::test_the_code_of_the_page"),
    ("docs/tutorial.md", "", "tests/e2e/test_tutorial.py::test_the_tutorial"),
    ("docs/workflows.md", "# an ordinary openai.AsyncOpenAI", f"{RUNS}::test_workflows"),
    ("docs/workflows.md", "class Solve(Workflow)", f"{RUNS}::test_workflows"),
    ("docs/workflows.md", "async def play", f"{RUNS}::test_workflows"),
]
#: Blocks of Python or SQL that no test runs: page, a part of the text, reason.
NOT_RUN: list[tuple[str, str, str]] = [
    ("docs/checkpoints.md", "mlflow.transformers.load_model", "tests/model_registry/test_upload.py loads such a model"),
]
#: YAML that is checked as far as this machine can: page, a part of the text, what its dry run needs.
CHECKED_IN_PART: list[tuple[str, str, str]] = [
    ("docs/guide.md", "engine: {kind: vllm}", "vLLM"),
    ("docs/guide.md", "engine: {urls:", "engines on other hosts"),
    ("docs/cluster.md", "address: auto", "a Ray cluster"),
    ("docs/cluster.md", "runtime_env:", "a Ray cluster"),
    ("docs/prompts.md", "prompt_search:", "held-out tasks"),
    ("docs/store.md", "store_url:", "s3fs"),
]
SHELLS, OUTPUT, CODE = ("bash", "sh", "shell", "console"), ("", "text", "mermaid"), ("python", "sql")


def listed(each: Block, table: list[tuple[str, str, str]]) -> list[str]:
    return [third for page, part, third in table if page == each.page and part in each.text]


def of(*languages: str) -> list[object]:
    return [pytest.param(each, id=str(each)) for each in BLOCKS if each.language in languages]


def test_every_language_has_a_rule() -> None:
    unknown = {str(each): each.language for each in BLOCKS if each.language not in (*SHELLS, *OUTPUT, *CODE, "yaml")}
    assert not unknown, "add a rule for this language to this file"


@pytest.mark.parametrize("each", of(*CODE))
def test_code_is_run_by_one_test(each: Block) -> None:
    runs = listed(each, RUN_BY) + listed(each, NOT_RUN)
    assert len(runs) == 1, f"{each}: no test runs this block, or several do: write one, and its row in RUN_BY of {HERE}"


@pytest.mark.parametrize(("page", "part", "test"), RUN_BY)
def test_the_named_tests_exist_and_read_the_page(page: str, part: str, test: str) -> None:
    assert not part or block(page, part)
    file, _, name = test.partition("::")
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    assert f"def {name}(" in text, f"{page}: {test} does not exist"
    assert Path(page).name in text, f"{page}: {file} does not read the page"


@pytest.mark.parametrize(("page", "part", "reason"), [*NOT_RUN, *CHECKED_IN_PART])
def test_exceptions_name_a_block_and_a_reason(page: str, part: str, reason: str) -> None:
    assert block(page, part) and reason


@pytest.mark.parametrize("each", of(*OUTPUT))
def test_output_contains_no_commands(each: Block) -> None:
    commands = [line for line in each.text.splitlines() if COMMAND.match(line)]
    assert not commands, f"{each}: {commands}: give the block the language bash"
    shown = [line.removeprefix("$ ") for line in each.text.splitlines() if line.startswith("$ ")]
    refused = [problem_of(words, each) for line in shown for words in commands_of(_with_text(each, line))]
    assert [problem for problem in refused if problem] == [], each


def _with_text(each: Block, text: str) -> Block:
    return Block(each.page, each.line, each.heading, "bash", "", text)


@pytest.mark.parametrize("each", of(*SHELLS))
def test_commands_are_accepted(each: Block) -> None:
    assert syntax_error(each) == "", each
    commands = list(commands_of(each))
    assert commands, f"{each}: no command"
    refused = {" ".join(words): problem_of(words, each) for words in commands}
    assert {line: problem for line, problem in refused.items() if problem} == {}, each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder, which user code is found in, on a machine with many processors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "cpu_count", lambda: 64)
    monkeypatch.setattr(checks, "model_check", lambda _: nullcontext(ModelCheck({}, None)))  # the model is ours
    return tmp_path


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a service that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize("each", of("yaml"))
def test_configurations_are_planned(each: Block, folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in re.findall(r"api_key_env: (\w+)", each.text):
        monkeypatch.setenv(variable, "a-key-of-the-page")
    if "reasoning_gym:" in each.text:
        pytest.importorskip("reasoning_gym", reason=f"{each} needs the package reasoning-gym")
    config = config_of(re.sub(r"https?://[\w.]+/v1", address, each.text), folder)
    if config is None:
        check_other(each)
    elif listed(each, CHECKED_IN_PART):
        assert resolve(config).config == config
    else:
        plan = checks.check_run(Home(folder / "home"), config, dry=True, service=config.online)
        assert all(finding.level != "error" for finding in plan.findings)


def check_other(each: Block) -> None:
    """YAML that is no part of ``rft.yaml``: the line for editors, a component, the configuration of a Dagster run."""
    content = yaml.safe_load(each.text)
    if content is None:
        assert each.text == EDITOR_LINE, f"{each}: neither settings nor the line for editors"
    elif content.keys() == {"type", "attributes"}:
        assert content["type"] == "rft_platform.RftProjectComponent"
        RftProjectComponent(**content["attributes"])
    else:
        from rft_platform.definitions import defs

        assert content.keys() == {"ops"}, f"{each}: neither a part of rft.yaml nor a configuration known here"
        assert dg.validate_run_config(defs.resolve_job_def("judge_job"), content)


def written(page: str, part: str, folder: Path) -> str:
    """The file of a block, for references to its functions."""
    file = folder / f"{Path(page).stem}_code.py"
    file.write_text(block(page, part).text)
    return str(file)


def test_judges(folder: Path) -> None:
    """Those of judges.md, on the runs of a task."""
    rows = rollouts(groups=1, repeats=2, run_output="It is 5.")
    tasks = {"task-0": Task("task-0", "set", "2+3?", "5", {"question": "2+3?", "answer": "5"})}
    single = build_judge(f"{written('docs/judges.md', 'async def judge', folder)}:judge")
    assert [run.reward for run in judge_runs(rows, tasks, single)] == [1.0, 1.0]
    folder = folder / "group"
    folder.mkdir()
    group = build_judge(f"{written('docs/judges.md', 'def best_of_group', folder)}:best_of_group")
    assert [run.reward for run in judge_runs(rows, tasks, group)] == [1.0, 1.0]


def test_code_of_other_systems(folder: Path) -> None:
    """The imports of a script for ``agentscope.tuner``, and the judge with a reward function of verl."""
    exec(block("docs/migration.md", "from rft_platform.tuner import").text, {})
    (folder / "my_rewards.py").write_text(
        "def compute_score(source, answer, truth, extra):\n    return answer == truth\n"
    )
    judge = build_judge(f"{written('docs/migration.md', 'from my_rewards import', folder)}:judge")
    row = {"data_source": "math", "reward_model": {"ground_truth": "5"}}
    tasks = {"task-0": Task("task-0", "set", "2+3?", "5", row)}
    runs = judge_runs(rollouts(groups=1, repeats=2, run_output="5"), tasks, judge)
    assert [run.reward for run in runs] == [1.0, 1.0]


def test_the_declaration_of_a_server() -> None:
    assert block("docs/architecture.md", "def _metrics").text.strip() == inspect.getsource(ui_servers._metrics).strip()


def test_redaction(folder: Path) -> None:
    redact = load_object(f"{written('docs/online.md', 'def redact', folder)}:redact", "service.redaction")
    assert redact("mail ann.lee@example.org today") == "mail [email] today"


def test_a_priority(folder: Path) -> None:
    name = f"{written('docs/synchronisation.md', 'def oldest_first', folder)}:oldest_first"
    priority = priority_of(ReplayBuffer(priority_fn=name))
    old, new = (Group(1, "g", "v", version, (), ()) for version in (4, 5))
    assert priority(old) > priority(new)


def test_queries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of store.md, synchronisation.md and dagster.md, on a store of one round."""
    store = ExperienceStore(folder / ".rft" / "rounds")
    rows = rollouts(round=3)
    store.write_rollouts(3, 0, rows)
    store.write_judged(3, "exact@1", judged(rows))
    names: dict[str, object] = {}
    exec(block("docs/store.md", "connection.sql(").text, names)
    assert "conversation_id" in capsys.readouterr().out
    assert len((folder / "conversations.jsonl").read_text().splitlines()) == len(rows) == len(names["frame"])  # type: ignore[arg-type]
    selection = {"row_id": rows[0].row_id, "round": 3, "judge_version": "exact@1", "use": TRAINED_ON[0], "uses": 0}
    write_selection(store, 3, [selection])
    with connect(store) as connection:
        found = connection.sql(block("docs/synchronisation.md", "SELECT use").text).fetchall()
    assert found == [(TRAINED_ON[0], 1)]
    part = block("docs/dagster.md", "rft_platform.load_round(").text
    assert '".rft/helper", 1' in part
    exec(part.replace('".rft/helper", 1', '".rft", 3'), {})
    assert "task-0" in capsys.readouterr().out
