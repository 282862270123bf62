"""Files that need exponential time, endless memory or endless nesting: each is refused by one line in seconds."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.config.home import Home

MOST_S = 5.0  # of processor time
ALIASES = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]" for n in range(10))


def refused(home: Home, result: Callable[[], Result]) -> str:
    """The one line that refuses a file, within MOST_S."""
    began = time.process_time()
    ended = result()
    assert time.process_time() - began < MOST_S
    assert ended.exit_code == 2, ended.output
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and len(line) < 1000
    assert not home.root.exists()
    return line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "more than 100,000 values"),
        ("name: &a [*a]", "contains itself"),
        ("name: &a {b: *a}", "contains itself"),
        pytest.param("name: " + "[" * 3000, "nested too deep", marks=pytest.mark.slow),
        pytest.param("name: " + "[" * 3000 + "]" * 3000, "nested too deep", marks=pytest.mark.slow),
        ("name: " + "[" * 150 + "]" * 150, "nested too deep"),
        pytest.param("name: " + "{a: " * 3000, "nested too deep", marks=pytest.mark.slow),
        ("".join(f"{' ' * n}a:\n" for n in range(600)), "nested too deep"),
        ("name: " + "9" * 5000, "digits"),
        ("name: x\n" + "# comment\n" * 200_000, "larger than"),
    ],
    ids=[
        "aliases",
        "itself",
        "itself in a section",
        "open",
        "deep",
        "less deep",
        "sections",
        "lines",
        "digits",
        "large",
    ],
)
def test_a_hostile_configuration_is_refused(
    home: Home, tmp_path: Path, rft: Callable[..., Result], text: str, message: str
) -> None:
    config = tmp_path / "hostile.yaml"
    config.write_text(text)
    line = refused(home, lambda: rft("run", "--config", config, "--dry-run"))
    assert str(config) in line and message in line


NUMBERS = {"5000 digits": "9" * 5000, "20 digits": "9" * 20, "16 digits": "1000000000000000"}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("setting", ["batch_size: 8", "total_steps: 2", "repeat_times: 4"])
def test_a_huge_number_is_refused(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result], number: str, setting: str
) -> None:
    config = write_config()
    name = setting.partition(":")[0]
    config.write_text(config.read_text().replace(setting, f"{name}: {NUMBERS[number]}"))
    if name == "total_steps" and number == "16 digits":  # a project that never ends
        assert rft("run", "--config", config, "--dry-run").exit_code == 0
    else:
        line = refused(home, lambda: rft("run", "--config", config, "--dry-run"))
        assert "expected at most" in line


def test_a_line_of_50_megabytes_is_refused(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    config = write_config()
    data = config.parent / "train.jsonl"
    data.write_text('{"question": "' + "x" * 50_000_000 + '", "answer": "1"}\n' + data.read_text())
    assert "train.jsonl" in refused(home, lambda: rft("run", "--config", config, "--dry-run"))
