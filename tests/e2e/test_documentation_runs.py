"""The code of README and docs/*.md, run as printed: before a real engine and a real service, or by the shell.

Only names of what a reader has differ: the model is the tiny one, data sets and programs are files of this test.
``tests/house/test_documentation_blocks.py`` says which blocks run here.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rft_platform.config.load import load_config
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import resolve_workflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rollout.workflows.chat_models import framework_models
from rft_platform.tasks.task import Task
from tests.experience.samples import rollouts
from tests.house.documentation_blocks import REPOSITORY, block
from tests.online.gateway.test_service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROW = {"question": "What is 2+3?", "answer": "5", "level": 1}
GAME = '''
class Game:
    """Two turns, each worth 0.5."""

    def __init__(self, level):
        self.turns = 0

    @property
    def over(self):
        return self.turns == 2

    def board(self):
        return {"turns": self.turns}

    def describe(self):
        return f"turn {self.turns}"

    def act(self, action):
        self.turns += 1
        return 0.5
'''
AGENT_JS = """
const question = process.argv[2];
const {OPENAI_BASE_URL: url, OPENAI_API_KEY: key} = process.env;
fetch(`${url}/chat/completions`, {
  method: "POST",
  headers: {"Content-Type": "application/json", Authorization: `Bearer ${key}`},
  body: JSON.stringify({model: "any", messages: [{role: "user", content: question}]}),
}).then((answer) => answer.json()).then((answer) => console.log(answer.choices[0].message.content));
"""
#: Page, a part of the block, name of the workflow in it, and the model calls that it makes.
WORKFLOWS = [
    ("README.md", "async def solve", "solve", 1),
    ("docs/algorithms.md", "model.set_env_state", "agent", 1),
    ("docs/policies.md", "# two_players.py", "play", 2),
    ("docs/recording.md", "get_openai_async_client()", "workflow", 1),
    ("docs/recording.md", "create_subprocess_exec", "workflow", 1),
    ("docs/workflows.md", "# an ordinary openai.AsyncOpenAI", "solve", 1),
    ("docs/workflows.md", "class Solve(Workflow)", "Solve", 1),
    ("docs/workflows.md", "async def play", "play", 2),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader, who has a game and an agent in JavaScript."""
    (tmp_path / "my_game.py").write_text(GAME)
    (tmp_path / "agent.js").write_text(AGENT_JS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "part", "name", "calls"), WORKFLOWS)
def test_workflows(page: str, part: str, name: str, calls: int, folder: Path, policy_engine: PolicyEngine) -> None:
    code = block(page, part).text
    if '"node"' in code and shutil.which("node") is None:
        pytest.skip(f"{page} starts node, which is not installed")
    (folder / "page_code.py").write_text(code)
    batch = run_rollouts(
        policy_engine, [Task("t", "set", ROW["question"], "5", ROW)],  # type: ignore[arg-type]
        resolve_workflow(f"{folder / 'page_code.py'}:{name}"), round=1, batch=0, repeat_times=1,
        sampling=SamplingParams(max_tokens=8), policies={"rival": policy_engine},
    )  # fmt: skip
    assert batch.report.failed == 0 and len(batch.rows) == calls
    if page == "README.md":
        judge = build_judge(f"{folder / 'page_code.py'}:judge")
        (judgement,) = judge_runs(batch.rows, {"t": Task("t", "set", "", "5", ROW)}, judge)
        assert judgement.error is None and judgement.reward in (0.0, 1.0)


def test_a_judge_asks_an_auxiliary_model(folder: Path, policy_engine: PolicyEngine) -> None:
    """That of evaluation.md."""
    (folder / "page_code.py").write_text(block("docs/evaluation.md", 'auxiliary_models["critic"]').text)
    spec = AuxiliarySpec(
        name="critic", model=policy_engine.status().model_path, base_url=policy_engine.base_url,
        engine_keys=(policy_engine.api_key or "",),
        defaults={"max_tokens": 8},
    )  # fmt: skip
    (judgement, *_) = judge_runs(
        rollouts(groups=1, repeats=1), {"task-0": Task("task-0", "set", "", "5", ROW)},
        build_judge(f"{folder / 'page_code.py'}:judge"),
        auxiliary_models=framework_models({"critic": AuxiliaryModel(spec)}),
    )  # fmt: skip
    assert judgement.error is None and judgement.reward in (0.0, 1.0)


@pytest.fixture
def service(policy_engine: PolicyEngine, folder: Path) -> Iterator[Service]:
    service = Service(policy_engine, folder)
    yield service
    service.close()


def test_clients_of_the_service(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of online.md and online_clients.md."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{service.url}/v1")  # of the production client
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def here(page: str, part: str) -> str:
        return block(page, part).text.replace("http://127.0.0.1:8010", service.url)

    names = _executed(here("docs/online.md", "client.chat.completions.create"), folder)
    answer = names["answer"].id  # type: ignore[attr-defined]
    done = _shell(here("docs/online.md", "ticket-4711").replace("chatcmpl-...", answer), folder)
    assert json.loads(done)["late"] == 1, "the block before committed the answer"
    program = names["OpenAI"].__module__.partition(".")[0]
    (folder / "my_agent.py").write_text(
        f"from {program} import OpenAI\n"
        'OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])\n'
    )
    assert json.loads(_shell(here("docs/online.md", "python my_agent.py"), folder))["matched"] == 1
    _executed(here("docs/online_clients.md", "with OnlineClient"), folder)
    _executed(here("docs/online_clients.md", "TrainingRunner("), folder)
    rewards = {row.reward for row in service.store.settle(1)}
    assert {1.0, 0.5} <= rewards


def _executed(code: str, folder: Path) -> dict[str, object]:
    """The names of a block that ran as a script."""
    (folder / "page_code.py").write_text(code)
    return runpy.run_path(str(folder / "page_code.py"), run_name="__main__")


def _shell(script: str, folder: Path) -> str:
    """What a block of commands prints; ``rft`` and ``python`` are those of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "RFT_HOME": str(folder / ".rft"),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_transformers_loads_a_checkpoint(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code of checkpoints.md; a checkpoint is a folder like that of the tiny model."""
    code = block("docs/checkpoints.md", "AutoModelForCausalLM").text
    place = '".rft/checkpoints/arithmetic/demo/global_step_320"'
    assert place in code
    names = _executed(code.replace(place, repr(str(tiny_model))), folder)
    assert names["output"].shape[0] == 1 and capsys.readouterr().out  # type: ignore[attr-defined]


def write_project(folder: Path, tiny_model: Path) -> None:
    """``rft.yaml``, ``my_dataset`` and ``model``, small enough for seconds."""
    (folder / "model").symlink_to(tiny_model)
    (folder / "my_dataset").mkdir()
    rows = [{"question": f"What is {number}+1?", "answer": str(number + 1)} for number in range(8)]
    for split in ("train", "test"):
        (folder / "my_dataset" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"path": "my_dataset", "split": "train", "workflow": "my_agent.py:solve", "judge": "numeric"}
    settings = {
        "project": "page", "name": "one",
        "model": {"model_path": "model", "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"batch_size": 4, "total_steps": 1, "explorer_input": {"taskset": taskset}},
    }  # fmt: skip
    (folder / "rft.yaml").write_text(yaml.safe_dump(settings))


def test_tune(folder: Path, tiny_model: Path) -> None:
    """The script of tune.md, with a smaller model, fewer steps, and a judge that an untrained model can satisfy."""
    write_project(folder, tiny_model)
    code = block("docs/tune.md", 'if __name__ == "__main__"').text
    smaller = {
        '"Qwen/Qwen3-0.6B"': '"model"', "max_model_len=4096": "max_model_len=64", "max_tokens=512": "max_tokens=8",
        "total_steps=100": "total_steps=1", "group_size=8": "group_size=4", "batch_size=32": "batch_size=4",
        'response.strip() == task["answer"]': "len(response) % 2",
    }  # fmt: skip
    for printed, value in smaller.items():
        assert printed in code
        code = code.replace(printed, value)
    table = 'pandas.json_normalize(result.to_json()["history"])'
    assert f"`{table}`" in (REPOSITORY / "docs" / "tune.md").read_text()
    (folder / "main.py").write_text(f"{code}\n    import pandas\n    print(*{table}.columns)\n")
    printed = _shell("python main.py", folder)
    assert "global_step_" in printed
    assert {"round", "reward", "metrics.loss", "eval.greedy_pass"} <= set(printed.split())


def test_commands_of_the_guide(folder: Path) -> None:
    """A project from the parts of the demo, and the conversion of a file of TRL; guide.md."""
    made, checked, _ = block("docs/guide.md", "rft new my_project").text.splitlines()
    assert "my_project" in _shell(made, folder)
    assert "steps" in _shell(checked, folder)
    (folder / "grpo.yaml").write_text("{model_name_or_path: my_project/model, dataset_name: my_project/tasks}")
    printed = _shell(block("docs/guide.md", "rft config convert").text, folder)
    assert "rollout_correction" in printed and load_config(folder / "rft.yaml").algorithm.algorithm_type == "grpo"


def test_debug_commands(folder: Path, tiny_model: Path) -> None:
    """Those of workflows.md, with the tiny model."""
    write_project(folder, tiny_model)
    (folder / "my_agent.py").write_text(block("docs/workflows.md", "# an ordinary openai.AsyncOpenAI").text)
    commands = block("docs/workflows.md", "rft debug workflow my_agent.py:solve").text
    printed = _shell(commands.replace("Qwen/Qwen3-0.6B", "tiny"), folder)
    assert printed.count("by numeric") == 3 and "mean log-prob" in printed
