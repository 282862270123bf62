"""The datasets that are made of traces: tasks, demonstrations and preference pairs.

Every row names its traces in the column ``imported_from``. No row has tokens: the policy did not sample these answers,
so they are never rows of a policy gradient.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.tasks.messages import Message, as_context
from rft_platform.tasks.task import ORIGIN
from rft_platform.traces.readers.trace import Trace

Row = dict[str, Any]
TASKS, DEMONSTRATIONS, PREFERENCES = KINDS = ("tasks", "demonstrations", "preferences")


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Which score compares answers, and which answers are demonstrations."""

    score: str | None = None  # None: the only score that the traces have
    min_score: float | None = None  # None: answers of any score, and those without

    def score_of(self, traces: Sequence[Trace]) -> str | None:
        """The name of the score; None if no score is named and the traces have none or several."""
        names = sorted({name for trace in traces for name in trace.scores})
        if self.score is None and self.min_score is None:
            return names[0] if len(names) == 1 else None
        if self.score is None and len(names) == 1:
            return names[0]
        if self.score is None or (self.score not in names and traces):
            known = f"the scores {', '.join(names)}; name one of these" if names else "no scores; leave out the option"
            given = "--min-score needs --score" if self.score is None else f"--score {self.score}"
            raise UserError(f"{given}: the traces have {known}")
        return self.score


@dataclass(frozen=True, slots=True)
class Datasets:
    """Rows by kind, and the score that compared them."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    score: str | None = None


def datasets_of(traces: Sequence[Trace], origin: dict[str, str], score_rule: ScoreRule) -> Datasets:
    """The rows of all traces. ``origin``: what every row says of its import, beside its traces."""
    score = score_rule.score_of(traces)
    made = _Maker(origin, score, score_rule.min_score)
    return Datasets(
        {
            TASKS: list(made.tasks(traces)),
            DEMONSTRATIONS: [row for trace in traces if (row := made.demonstration(trace)) is not None],
            PREFERENCES: list(made.pairs(traces)),
        },
        score,
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    origin: dict[str, str]
    score: str | None
    min_score: float | None

    def tasks(self, traces: Iterable[Trace]) -> Iterator[Row]:
        """One task for each prompt with its tools; the reference answer is a correction, if one trace has any."""
        for group in _grouped(traces, lambda trace: [trace.prompt, trace.tools]):
            prompt, tools = group[0].prompt, group[0].tools
            question = next(message for message in reversed(prompt) if message["role"] == "user")
            system = [message["content"] for message in prompt if message["role"] in ("system", "developer")]
            yield {
                "question": question["content"],
                "answer": next((trace.correction for trace in group if trace.correction), None),
                **({"system": "\n".join(system)} if system else {}),
                "messages": [message for message in prompt if message["role"] not in ("system", "developer")],
                "tools": tools,
                ORIGIN: self._origin(group),
            }

    def demonstration(self, trace: Trace) -> Row | None:
        """The corrected conversation, or the whole one; None for a failed trace, and for one with too low a score."""
        known, answer = _known(trace), _final(trace)
        if trace.correction:
            answer = {"role": "assistant", "content": trace.correction}
        elif answer is None or trace.failed or not self._is_good(trace):
            return None
        context = as_context(known) if trace.correction else [*as_context(trace.prompt), *known[len(trace.prompt) :]]
        return {"messages": [*context, answer], **_tools(trace), ORIGIN: self._origin([trace])}

    def pairs(self, traces: Sequence[Trace]) -> Iterator[Row]:
        """The best and the worst answer to the same messages, and each correction with the answer that it replaces."""
        for trace in traces:
            answer = _final(trace)
            if trace.correction and answer is not None and answer["content"] != trace.correction:
                yield self._pair(trace, {"role": "assistant", "content": trace.correction}, answer, [trace])
        scored = [trace for trace in traces if self.score in trace.scores and _final(trace) and not trace.failed]
        for group in _grouped(scored, lambda trace: [_known(trace), trace.tools]):
            ranked = sorted(group, key=lambda trace: trace.scores[str(self.score)])
            worst, best = ranked[0], ranked[-1]
            chosen, rejected = _final(best), _final(worst)
            if best.scores[str(self.score)] > worst.scores[str(self.score)] and chosen != rejected:
                yield self._pair(best, chosen, rejected, [best, worst])

    def _pair(self, trace: Trace, chosen: Message | None, rejected: Message | None, of: Sequence[Trace]) -> Row:
        known = {"prompt": _known(trace), "chosen": [chosen], "rejected": [rejected]}
        return {**known, **_tools(trace), ORIGIN: self._origin(of)}

    def _is_good(self, trace: Trace) -> bool:
        if self.min_score is None or self.score is None:
            return True
        return trace.scores.get(self.score, float("-inf")) >= self.min_score

    def _origin(self, traces: Iterable[Trace]) -> list[dict[str, Any]]:
        """What a row says of each of its traces."""
        return [{**self.origin, "id": trace.trace_id, "link": trace.link, "subject": trace.subject} for trace in traces]


def _known(trace: Trace) -> list[Message]:
    """The messages before the last answer; all of them if the trace ends otherwise, as with the result of a tool."""
    return [*trace.prompt, *(trace.answer if _final(trace) is None else trace.answer[:-1])]


def _final(trace: Trace) -> Message | None:
    """The last answer; None if the trace ends otherwise."""
    last = trace.answer[-1] if trace.answer else None
    return last if last is not None and last["role"] == "assistant" else None


def _tools(trace: Trace) -> Row:
    return {"tools": trace.tools} if trace.tools else {}


def _grouped(traces: Iterable[Trace], key: Any) -> Iterable[list[Trace]]:
    groups: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        groups[digest_json(key(trace))].append(trace)
    return groups.values()
