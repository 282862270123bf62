"""Every SQLite file that several processes use: all of them open it at the same moment, while it is not there yet."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ANSWERS = """
from rft_platform.judging.judge_context import AnswerStore

def use(folder, name):
    store = AnswerStore(folder / "answers.sqlite")
    store.keep(name, "model", "answer")
    store.close()

def count(folder):
    store = AnswerStore(folder / "answers.sqlite")
    return sum(store.find(str(name)) is not None for name in range(100))
"""

DAGSTER = """
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance

def use(folder, name):
    with open_instance(Home(folder), capture_output=False) as instance:
        instance.add_dynamic_partitions("names", [name])
        instance.get_runs_count()
        instance.all_instigator_state()

def count(folder):
    with open_instance(Home(folder), capture_output=False) as instance:
        return len(instance.get_dynamic_partitions("names"))
"""

MLFLOW = """
from rft_platform.model_registry.mlflow_client import open_client

def use(folder, name):
    open_client(f"sqlite:///{folder / 'mlflow.db'}").create_experiment(name)

def count(folder):
    return len(open_client(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()) - 1  # less the default one
"""

#: argv: folder, name of the process. Standard input says when to begin: once a line, each time in another folder.
PROGRAM = """
import sys, time
from pathlib import Path
{code}
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    while time.time() < float(line):
        pass
    use(Path(sys.argv[1]) / str(number), sys.argv[2])
    print("used", flush=True)
"""

COUNT = """
import sys
from pathlib import Path
{code}
print(*[count(folder) for folder in sorted(Path(sys.argv[1]).iterdir())])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("code", "processes", "times"),
    [(ANSWERS, 8, 60), (DAGSTER, 4, 2), (MLFLOW, 3, 1)],
    ids=["judges' answers", "Dagster", "MLflow"],
)
def test_processes_open_a_new_database_concurrently(tmp_path: Path, code: str, processes: int, times: int) -> None:
    program = PROGRAM.format(code=code)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in range(processes)
    ]  # fmt: skip
    try:
        assert {line(process) for process in started} == {"ready"}
        for _ in range(times):
            moment = time.time() + 0.02
            for process in started:
                assert process.stdin is not None
                process.stdin.write(f"{moment}\n")
                process.stdin.flush()
            assert {line(process) for process in started} == {"used"}
    finally:
        for process in started:
            process.kill()
            process.communicate()
    counted = subprocess.run(
        [sys.executable, "-c", COUNT.format(code=code), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert counted.stdout.split()[-times:] == [str(processes)] * times


def line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process prints; fails with its errors where it has ended."""
    assert process.stdout is not None and process.stderr is not None
    text = process.stdout.readline().strip()
    if not text:
        pytest.fail(process.stderr.read()[-3000:])
    return text
