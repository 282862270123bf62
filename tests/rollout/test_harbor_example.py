"""The example harbor: task folders in the sandbox, what they may not do, and folders that need a container."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "harbor"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("workflow", "task_folder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(task_folder=import_module("task_folder"), workflow=import_module("workflow"))
    for name in ("workflow", "task_folder"):
        sys.modules.pop(name, None)


class Commands:
    """A model that calls ``bash`` with these commands, one after the other, and then answers."""

    def __init__(self, *commands: Any, answer: str = "done") -> None:
        self.commands, self.answer = list(commands), answer
        self.told: list[str] = []

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
        self.told = [message["content"] for message in messages if message["role"] == "tool"]
        if not self.commands:
            return {"role": "assistant", "content": self.answer}
        arguments = self.commands.pop(0)
        arguments = arguments if isinstance(arguments, dict) else {"command": arguments}
        call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


async def played(example: Any, task: str, model: Commands, **options: Any) -> Any:
    """The output of a run."""
    workflow = example.workflow.HarborWorkflow("tasks", **options)
    return await workflow.run(SimpleNamespace(raw={"task": task}), model)


def names(folder: Path) -> list[str]:
    """Names of everything below a folder."""
    return sorted(file.name for file in folder.rglob("*"))


@pytest.mark.slow
async def test_the_tests_of_a_task_give_the_reward(example: Any) -> None:
    model = Commands("pwd; cat /app/data/numbers.txt; echo $UNIT", "echo 49 > total.txt")
    output = await played(example, "total", model)
    assert model.told[0] == "/app\n12\n7\n30\napples\n"
    assert (output.reward, output.metrics) == (1.0, {"written": 1.0, "turns": 3.0, "commands": 2.0})
    assert (await played(example, "total", Commands("echo 5 > /app/total.txt"))).reward == 0.0
    assert (await played(example, "hello", Commands("touch /app/greeting.txt"))).reward == 0.5
    assert (await played(example, "brief", Commands(answer="x" * 35))).reward == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("task", ["hello", "total"])
async def test_the_solution_of_a_task_has_the_whole_reward(example: Any, task: str) -> None:
    script = (EXAMPLE / "tasks" / task / "solution" / "solve.sh").read_text()
    assert (await played(example, task, Commands(script))).reward == 1.0


@pytest.mark.slow
async def test_the_agent_writes_neither_the_reward_nor_outside_its_folder(example: Any, tmp_path: Path) -> None:
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "kept").write_text("x")
    model = Commands(
        "ls /tests; mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        f"rm -rf /logs /tests; ln -s {tmp_path} /logs; ln -s {tmp_path} /tests",
    )
    output = await played(example, "hello", model)
    assert (output.reward, model.told[0]) == (0.0, ""), "the tests are not there while the agent works"
    assert (output.response, names(tmp_path)) == ("done", ["kept", "verifier"])


@pytest.mark.parametrize("paths", [("tests", "logs"), ("logs/verifier", "logs/agent")])
def test_files_in_place_of_the_folders_of_the_tests_do_not_keep_them_away(
    example: Any, tmp_path: Path, paths: tuple[str, ...]
) -> None:
    task = example.task_folder.HarborTask.read(EXAMPLE / "tasks" / "hello")
    for path in paths:  # as an agent leaves them that wants no reward to be measured
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x")
    task.add_tests(tmp_path, "done")
    assert (tmp_path / "tests" / "test.sh").is_file() and (tmp_path / "logs" / "verifier").is_dir()
    assert (tmp_path / "logs" / "agent" / "answer.txt").read_text() == "done"


@pytest.mark.slow
async def test_what_commands_come_to_is_told_the_model(example: Any) -> None:
    model = Commands("exit 3", "sleep 30", {"cmd": "ls"}, "seq 1000")
    output = await played(example, "hello", model, command_s=1.0, shown=100)
    assert model.told[0] == "\n[exit code 3]" and model.told[1].endswith("[stopped: it took too long]")
    assert model.told[2].startswith("error: expected the tool bash with a command")
    assert model.told[3].endswith("999\n1000\n") and len(model.told[3]) == 100
    assert output.metrics["commands"] == 4.0


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("environment/Dockerfile", "FROM debian\nRUN apt-get install -y jq", "environment/Dockerfile has RUN apt-get"),
        ("environment/Dockerfile", "FROM a\nCOPY --from=b /x /y", "environment/Dockerfile has COPY --from=b"),
        ("environment/Dockerfile", 'FROM a\nCOPY ["x", "/app/"]', r'has COPY \["x", "/app/"\]'),
        ("environment/Dockerfile", "FROM a\nARG D=x\nCOPY $D /app/", r"has COPY \$D /app/"),
        ("environment/Dockerfile", "FROM a\nCOPY *.txt /app/", r"has COPY \*\.txt /app/"),
        ("environment/Dockerfile", "FROM a\nCOPY <<END /app/x\nCMD\nEND", "has COPY <<END /app/x"),
        ("environment/Dockerfile", "FROM a\nCOPY x", "has COPY x"),
        ("environment/Dockerfile", "FROM a\nENV UNIT kg", "has ENV UNIT kg"),
        ("environment/Dockerfile", "FROM a\nENV PATH=/app:$PATH", r"has ENV PATH=/app:\$PATH"),
        ("environment/Dockerfile", "FROM a\nENV NAME='x", "has ENV NAME='x"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app/${D}", r"has WORKDIR /app/\$\{D\}"),
        ("environment/docker-compose.yaml", "services: {}", "describes several services"),
        ("task.toml", '[environment]\ndocker_image = "x:1"', "environment.docker_image of task.toml is 'x:1'"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "its verifier has an environment of its own"),
        ("tests/test.sh", "cd /app\nuvx pytest /tests", r"tests/test.sh installs or downloads \(uvx\)"),
    ],
)
def test_a_task_that_needs_a_container_is_refused_with_the_road(
    example: Any, tmp_path: Path, file: str, text: str, reason: str
) -> None:
    shutil.copytree(EXAMPLE / "tasks" / "total", tmp_path / "tasks" / "t")
    (tmp_path / "tasks" / "t" / file).write_text(text)
    with pytest.raises(example.task_folder.NeedsContainerError, match=reason) as refused:
        example.task_folder.HarborTask.read(tmp_path / "tasks" / "t")
    assert "taskset harbor" in str(refused.value) and "Docker" in str(refused.value)


def test_paths_of_the_container_are_translated(example: Any, tmp_path: Path) -> None:
    task = example.task_folder.HarborTask.read(EXAMPLE / "tasks" / "total")
    box = Path("/box")
    for text in ("cat /app/x /tests", "open('/logs/verifier/a')", "X=/app", "/app"):
        assert task.translate(text, box) == text.replace("/app", "/box/app").replace("/tests", "/box/tests").replace(
            "/logs", "/box/logs"
        )
    for text in ("./app/x", "/usr/app", "/application", "a/tests/b", "/app-data"):
        assert task.translate(text, box) == text


@pytest.mark.slow
def test_rows_are_written_and_tasks_left_out_are_named(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tasks", tmp_path / "tasks")
    (tmp_path / "tasks" / "hello" / "environment" / "Dockerfile").write_text("FROM a\nRUN make\n")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "rows.py"), str(tmp_path / "tasks")], capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["task"] for line in done.stdout.splitlines()] == ["brief", "total"]
    assert "left out" in done.stderr and "has RUN make" in done.stderr
    written = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
    assert [row["task"] for row in written] == ["brief", "hello", "total"]
