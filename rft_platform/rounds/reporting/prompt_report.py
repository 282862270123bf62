"""The newest search for a prompt: its note, and the report that compares it with the training.

The report is written after the search, when no round may have been trained yet, and again by ``rft prompt report``.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_sealed_json, write_sealed_json
from rft_platform.config.home import Home
from rft_platform.evaluation.comparison import Comparison, compare
from rft_platform.evaluation.gate import GateDecision
from rft_platform.evaluation.prompt_plot import PromptCurvePoint, prompt_and_training
from rft_platform.evaluation.report import comparison_cell, data_uri, table, write_report
from rft_platform.evaluation.results import EvaluationResult, measured_alike
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, read
from rft_platform.rounds.reporting.round_history import curve_point, evaluation_of

_NOTE = "search.json"


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """A prompt that was better than all before it in the search."""

    text: str
    reward: float  # mean over the tasks of the search
    runs: int  # of the search, until it was measured
    result: EvaluationResult  # on the first held-out taskset


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of a search for a prompt. The first point is the starting prompt."""

    policy_version: int
    points: list[PromptPoint]
    tried: int  # prompts that were measured on all tasks of the search
    runs: int
    tasks: int  # of the search
    decision: GateDecision
    lineage: dict[str, str]
    seconds: float
    address: str = ""  # in MLflow's prompt registry; empty: not registered

    @property
    def found(self) -> bool:
        """Whether a prompt was better than the starting one on the tasks of the search."""
        return len(self.points) > 1

    @property
    def best(self) -> PromptPoint:
        """The best prompt; the starting one if none was better."""
        return self.points[-1]

    def tags(self) -> dict[str, str]:
        """The tags of the prompt's version: its lineage and its scores."""
        scores = {
            name: f"{value:.4f}"
            for name in ("sampled_pass", "greedy_pass", "mean_reward")
            if (value := self.best.result.value(name)) is not None
        }
        return {**self.lineage, **scores, "gate": self.decision.reason}


def read_prompt_result(home: Home) -> PromptResult:
    """The newest search of the project. Raises UserError if there is none."""
    file = home.prompts / _NOTE
    if not file.exists():
        raise UserError(f"no search for a prompt in {home.root}: run `rft prompt optimise` first")
    return TypeAdapter(PromptResult).validate_python(read_sealed_json(file))


def write_prompt_report(project: Project, result: PromptResult) -> Path:
    """Write the note of a search and its report; returns the report."""
    write_sealed_json(project.home.prompts / _NOTE, TypeAdapter(PromptResult).dump_python(result))
    comparison = _Comparison(project, result)
    return write_report(project.home.prompts, comparison.markdown, comparison.picture())


def prompt_page(project: Project, result: PromptResult) -> str:
    """The report as a page without other files."""
    comparison = _Comparison(project, result)
    return comparison.markdown(data_uri(comparison.picture()))


def headline(project: Project, result: PromptResult) -> str:
    """What the prompt alone gives and what the training gives, in one line."""
    return _Comparison(project, result).headline()


class _Comparison:
    """The search beside the rounds that were evaluated in the same way."""

    def __init__(self, project: Project, result: PromptResult) -> None:
        self._project, self._result = project, result
        store, first = project.store, result.points[0].result
        self._rounds: dict[int, EvaluationResult] = {}
        for number in store.rounds():
            evaluation = evaluation_of(store, number)
            if evaluation is not None and measured_alike(evaluation, first):
                self._rounds[number] = evaluation
        self._trained = max((number for number in self._rounds if number), default=None)

    def headline(self) -> str:
        """As in ``the prompt alone gives 61.0 % (start 48.5 %), 20 rounds give 84.0 %``."""
        gives = f"the prompt alone gives {_share(self._result.best.result)}"
        line = gives if self._result.found else "no better prompt was found"
        line += f" (start {_share(self._result.points[0].result)})"
        if self._trained is None:
            return f"{line}; no round was evaluated yet"
        rounds = "1 round gives" if self._trained == 1 else f"{self._trained} rounds give"
        return f"{line}, {rounds} {_share(self._rounds[self._trained])}"

    def picture(self) -> bytes:
        """Both curves, with the same axis of pass rates."""
        found = [
            PromptCurvePoint(point.runs, *_rate(point.result), point.result.value("greedy_pass"))
            for point in self._result.points
        ]
        rounds = [curve_point(read(self._project.store, number), each.summary())
                  for number, each in self._rounds.items()]  # fmt: skip
        title = f"{self._project.config.project} / {self._project.config.name}"
        return prompt_and_training(found, self._result.runs, [point for point in rounds if point], title)

    def markdown(self, picture: str) -> str:
        """The report; ``picture`` is the address of the picture."""
        result, config = self._result, self._project.config
        rule = "Better" if result.decision.passed else "Not better"
        parts = [
            f"# {config.project} / {config.name}: the prompt and the training",
            self.headline()[0].upper() + self.headline()[1:] + ": pass rates on the held-out tasks, sampled.",
            f"![pass rates of prompts and of rounds]({picture})",
            f"**{rule}:** {result.decision.reason}",
            self._prompts_table(),
            self._rounds_table(),
            f"## The best prompt ({result.address or 'not registered'})" if result.found else "## The starting prompt",
            _fenced(result.best.text),
            "## What it was made of",
            table(["", ""], [[name, value] for name, value in result.lineage.items()]),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def _prompts_table(self) -> str:
        """One row for each prompt that was better than all before it."""
        rows = []
        for number, point in enumerate(self._result.points):
            name = f"prompt {number}" if number else "starting prompt"
            difference = self._difference(point.result, self._result.points[0].result) if number else ""
            rows.append([name, f"{point.runs:,}", f"{point.reward:.4f}", *_cells(point.result), difference])
        said = (
            f"The search made {self._result.runs:,} runs on {self._result.tasks:,} tasks in "
            f"{self._result.seconds:,.0f} s and measured {self._result.tried:,} prompts on all of them."
        )
        header = [
            "prompt",
            "runs so far",
            "reward in the search",
            "held out: sampled",
            "greedy",
            "from the start, 95 %",
        ]
        return f"## The prompt alone\n\n{said}\n\n{table(header, rows)}"

    def _rounds_table(self) -> str:
        """One row for each evaluated round, with its difference from the best prompt."""
        if self._trained is None:
            return "## The training\n\nNo round was evaluated yet: `rft prompt report` writes this page again."
        rows, calls = [], 0
        for number in self._project.store.rounds():
            calls += (read(self._project.store, number).explored or Explored()).rows
            if (result := self._rounds.get(number)) is not None:
                difference = self._difference(result, self._result.best.result)
                rows.append([f"round {number}" if number else "start", f"{calls:,}", *_cells(result), difference])
        header = ["weights", "model calls so far", "held out: sampled", "greedy", "from the best prompt, 95 %"]
        return f"## The training\n\n{table(header, rows)}"

    def _difference(self, result: EvaluationResult, other: EvaluationResult) -> str:
        found: Comparison | None = compare(result, other, "sampled_pass", "prompt")
        return "" if found is None else f"{comparison_cell(found)}, {found.verdict}"


def _rate(result: EvaluationResult) -> tuple[float | None, float | None, float | None]:
    rate = result.sampled
    return (None, None, None) if rate is None else (rate.value, rate.low, rate.high)


def _share(result: EvaluationResult) -> str:
    rate = result.sampled or result.greedy
    return "nothing measured" if rate is None else f"{100 * rate.value:.1f} %"


def _cells(result: EvaluationResult) -> list[str]:
    return ["–" if rate is None else f"{rate.value:.1%}" for rate in (result.sampled, result.greedy)]


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
