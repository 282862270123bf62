"""Search for a better prompt with GEPA: a model reads runs and proposes a prompt, which is kept if it scores better.

GEPA (Agrawal et al., GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning, 2025; package ``gepa``)
keeps the prompts that are best on some task. It takes one of them, runs it on a few tasks, and shows these runs to a
reflection model, which writes a new prompt. If that is better on the same tasks, it is measured on all of them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

_COMPONENT = "system_prompt"
_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One run of a task with a prompt: its reward, and what the reflection model reads about it."""

    reward: float
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class FailureReward:
    """What a failed run counts: 0, or the lowest reward so far if that is negative. So no prompt gains by failing."""

    value: float = 0.0

    def after(self, rewards: Iterable[float]) -> float:
        """The value when runs that did not fail had these rewards."""
        self.value = min([self.value, *rewards])
        return self.value


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """A prompt that was better than all before it: its mean reward, and the runs made until it was measured."""

    text: str
    reward: float
    runs: int


@dataclass(frozen=True, slots=True)
class FoundPrompts:
    """The result of a search: the starting prompt, and each later one that was better than all before it."""

    prompts: tuple[FoundPrompt, ...]
    tried: int  # prompts that were measured on all tasks, the starting one included
    runs: int  # of the whole search

    @property
    def best(self) -> FoundPrompt:
        """The last one; the starting prompt if none was better."""
        return self.prompts[-1]


def search_prompts(
    run: Callable[[str, Sequence[T]], Sequence[PromptRun]],
    tasks: Sequence[T],
    start: str,
    reflect: Callable[[str], str],
    *,
    runs: int,
    minibatch: int,
    seed: int = 0,
) -> FoundPrompts:
    """Search for a prompt with a higher mean reward than ``start``.

    ``run`` makes one run of each given task with a prompt; ``reflect`` answers a question to the reflection model. The
    search ends after ``runs`` runs; a prompt that is being measured then is measured to its end. No reward
    counts as perfect, because rewards have no upper bound. Errors of ``run`` and ``reflect`` end the search.
    """
    import gepa

    errors: list[Exception] = []  # GEPA logs errors of proposals and continues
    found = gepa.optimize(
        seed_candidate={_COMPONENT: start},
        trainset=list(tasks),
        adapter=_Adapter(_noting(errors, run)),
        reflection_lm=_noting(errors, lambda prompt: reflect(_text(prompt))),
        stop_callbacks=lambda _state: bool(errors),
        max_metric_calls=runs,
        reflection_minibatch_size=min(minibatch, len(tasks)),
        skip_perfect_score=False,  # GEPA would propose nothing for rewards of 1 and more
        seed=seed,
        logger=_Quiet(),
    )
    if errors:
        raise errors[0]
    best: list[FoundPrompt] = []
    # GEPA counts the runs before a prompt was measured on all tasks.
    measured = zip(found.candidates, found.val_aggregate_scores, found.discovery_eval_counts, strict=True)
    for candidate, reward, spent in measured:
        if not best or reward > best[-1].reward:
            best.append(FoundPrompt(candidate[_COMPONENT], reward, spent + len(tasks)))
    return FoundPrompts(tuple(best), len(found.candidates), found.total_metric_calls or 0)


@dataclass(frozen=True, slots=True)
class _Adapter(Generic[T]):
    """What GEPA calls: runs of a prompt, and the records of these runs for the reflection model."""

    run: Callable[[str, Sequence[T]], Sequence[PromptRun]]
    propose_new_texts: None = None  # GEPA asks the reflection model itself

    def evaluate(self, batch: list[T], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        import gepa

        made = list(self.run(candidate[_COMPONENT], batch))
        return gepa.EvaluationBatch(
            outputs=made, scores=[each.reward for each in made], trajectories=made if capture_traces else None
        )

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        records = [{**each.record, "reward": each.reward} for each in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, records)


class _Quiet:
    """Sends GEPA's lines, which it prints by default, to the log."""

    def log(self, message: str) -> None:
        _log.debug("%s", message)


def _noting(errors: list[Exception], call: Callable[..., R]) -> Callable[..., R]:
    """``call``, whose errors are added to ``errors`` and raised."""

    def noting(*arguments: Any) -> R:
        try:
            return call(*arguments)
        except Exception as error:
            errors.append(error)
            raise

    return noting


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """GEPA's question; it is one text unless a task has pictures."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)
