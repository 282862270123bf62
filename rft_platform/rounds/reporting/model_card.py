"""The model card of exported weights: what they were made from and how good they are, in the Hugging Face hub's format.

Every figure comes from the records of the project: the lineage of the weights and the evaluation of their version. The
card names no folder of the machine.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft_platform.common.redaction import redact
from rft_platform.evaluation.report import comparison_table, table
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.rounds.project.record import RoundEvaluation
from rft_platform.rounds.reporting.lineage import CheckpointTrace, TrainingTrace, of_rounds, total_rows

_HUB_CACHE = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")  # a folder of the hub's cache


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card states beside the lineage and the evaluation."""

    title: str
    tasksets: Sequence[str]  # names of the held-out tasksets, in the order of the evaluation's results
    weights_digest: str  # of the exported safetensors
    merged: bool  # whether a LoRA adapter was merged into the base model
    licence: str | None = None  # identifier on the hub


def model_card(trace: CheckpointTrace, evaluated: RoundEvaluation | None, facts: CardFacts) -> str:
    """The text of the card's ``README.md``: metadata, evaluation, training, and how to load the weights."""
    newest = trace.trainings[0]
    results = list(zip(facts.tasksets, evaluated.results if evaluated else (), strict=False))
    name = f"{newest.more.get('project')}/{newest.more.get('name')}"
    origin = f"Policy version {newest.result.policy_version} of {name}"
    version = "" if newest.result.model_version is None else f", model version {newest.result.model_version}"
    parts = [
        f"---\n{_metadata(trace, results, facts)}\n---",
        f"# {facts.title}",
        f"{origin}{version}, trained from {_base(trace)} by rft_platform.",
        "## Evaluation",
        *_evaluation(evaluated, results),
        "## Training",
        table(["", ""], [[name, value] for name, value in _training(trace, facts) if value]),
        "## Use",
        _USE,
    ]
    return redact("\n\n".join(parts)) + "\n"


_USE = """The folder loads in transformers and vLLM:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
```"""


def hub_name(base_model: str) -> str | None:
    """The name of a base model on the hub; None for a folder that is not in the hub's cache."""
    cached = _HUB_CACHE.search(base_model)
    if cached is not None:
        return f"{cached['org']}/{cached['name']}"
    named = base_model.count("/") == 1 and all(base_model.split("/")) and not Path(base_model).exists()
    return base_model if named else None


def _base(trace: CheckpointTrace) -> str:
    return hub_name(trace.base_model) or f"`{Path(trace.base_model).name}`"


def _metadata(trace: CheckpointTrace, results: Sequence[tuple[str, EvaluationResult]], facts: CardFacts) -> str:
    """The hub's metadata. The scores in it are not rounded."""
    from huggingface_hub import EvalResult, ModelCardData

    algorithm = trace.trainings[0].more.get("algorithm")
    scores = [
        EvalResult("text-generation", "held-out", taskset, metric, value, metric_name=metric)
        for taskset, result in results
        for metric, value, _ in _scores(result)
    ]
    data = ModelCardData(
        base_model=hub_name(trace.base_model),
        library_name="transformers",
        license=facts.licence,
        pipeline_tag="text-generation",
        tags=["rft-platform", *([str(algorithm)] if algorithm else [])],
        model_name=facts.title,
        eval_results=scores or None,
    )
    return str(data.to_yaml())


def _scores(result: EvaluationResult) -> Iterator[tuple[str, float, str]]:
    """Metric, value, and both as people read them."""
    for metric, rate in (("sampled_pass", result.sampled), ("greedy_pass", result.greedy)):
        if rate is not None:
            yield metric, rate.value, f"{rate.value:.1%} ({rate.low:.1%} to {rate.high:.1%})"
    if result.mean_reward is not None:
        yield "mean_reward", result.mean_reward, f"{result.mean_reward:.4f}"


def _evaluation(evaluated: RoundEvaluation | None, results: Sequence[tuple[str, EvaluationResult]]) -> Iterator[str]:
    if evaluated is None or not results:
        yield "This version was not evaluated."
        return
    rows = [
        [taskset, f"{result.tasks:,}", metric, shown]
        for taskset, result in results
        for metric, _, shown in _scores(result)
    ]
    yield table(["held-out tasks", "number", "metric", "value (95 % interval)"], rows)
    yield "`sampled_pass` and `greedy_pass` are the shares of runs that passed (reward >= 1)."
    if evaluated.compared:
        yield comparison_table(evaluated.compared)
    if evaluated.gate:
        yield f"Gate: {evaluated.gate}."
    if evaluated.regression is not None:
        yield f"Compared with the start on the {evaluated.regression.decision.reason}."


def _training(trace: CheckpointTrace, facts: CardFacts) -> Iterator[tuple[str, str | None]]:
    newest, every = trace.trainings[0], trace.trainings
    own, rows = of_rounds(every), total_rows(every)
    rounds = sorted({training.result.round for training in own if training.result.round})
    before = len(every) - len(own)
    warm_start = f"after a warm start with {before:,} checkpoint{'' if before == 1 else 's'}" if before else None
    code = {
        "platform": newest.code_version,
        "agent": newest.more.get("workflow_code"),
        "judge": newest.more.get("judge_code"),
    }
    yield "base model", _base(trace) + ("" if trace.complete else " (the records of earlier trainings are missing)")
    yield "rounds", f"{rounds[0]} to {rounds[-1]}" if rounds else None
    yield "trainings", ", ".join(filter(None, (f"{len(own):,}", warm_start)))
    yield "algorithm", newest.more.get("algorithm")
    yield "rows trained on", "not recorded for every training" if rows is None else f"{rows:,}"
    yield "rows dropped by filters", None if rows is None else f"{sum(each.rows_dropped for each in own):,}"
    yield "judges", ", ".join(dict.fromkeys(filter(None, map(_judge, every))))
    yield "code", ", ".join(f"{name} `{digest}`" for name, digest in code.items() if digest)
    yield "configuration", newest.config_digest and f"`{newest.config_digest}`"
    yield "weights", f"sha256 `{facts.weights_digest}`" + (", LoRA adapter merged" if facts.merged else "")
    yield "licence of the base model", facts.licence or "not recorded"


def _judge(training: TrainingTrace) -> str | None:
    if training.judge_version is None:
        return None
    return f"{training.judge_name or 'judge'} (`{training.judge_version}`)"
