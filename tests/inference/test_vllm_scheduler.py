"""Answers in pieces, on a scheduler without a GPU: what the API server receives is what vLLM would have sent."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rft_platform.inference.vllm_engine.scheduler import PIECE, InPieces

FINAL_ONLY, DELTA = "final only", "delta"
INLINE_BYTES = 256  # VLLM_MSGPACK_ZERO_COPY_THRESHOLD


class Table(NamedTuple):
    """vLLM's ``LogprobsLists``."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class RunnerOutput:
    """The fields of vLLM's ``ModelRunnerOutput`` that matter here."""

    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: Table | None


@dataclass
class Output:
    """The fields of vLLM's ``EngineCoreOutput`` that matter here."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Table | None = None
    finish_reason: str | None = None
    events: list[str] | None = None
    prefill_stats: str | None = None


@dataclass
class Plain:
    """A scheduler that sends every token of every request at once, as vLLM's does; requests end at their limit."""

    requests: dict[str, Any] = field(default_factory=dict)
    num_spec_tokens: int = 0
    cut: int = 0  # slices of log-prob tables

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[tuple[str, int]]:
        return [(name, 0) for name in request_ids if self.requests.pop(name, None)]

    def update_from_output(self, scheduler_output: Any, runner: RunnerOutput) -> dict[int, Any]:
        outputs = []
        for name in scheduler_output.num_scheduled_tokens:
            request, index = self.requests[name], runner.req_id_to_index[name]
            ids, table = runner.sampled_token_ids[index], None
            if request.sampling_params.logprobs is not None and runner.logprobs is not None:
                self.cut += 1
                starts = runner.logprobs.cu_num_generated_tokens
                start = index if starts is None else starts[index]
                table = Table(*(part[start : start + len(ids)] for part in runner.logprobs[:3]))
            first = not request.sent
            request.sent += len(ids)
            ended = request.sent >= request.limit
            if ended:
                del self.requests[name]
            began = (["scheduled"], "prefill") if first else (None, None)
            outputs.append(Output(name, ids, table, "length" if ended else None, *began))
        return {0: SimpleNamespace(outputs=outputs)}


class Pieces(InPieces, Plain):
    """The scheduler under test."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two names of vLLM that the scheduler imports."""
    outputs: Any = ModuleType("vllm.v1.outputs")
    outputs.LogprobsLists = Table
    params: Any = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=FINAL_ONLY)
    for name, module in {
        **{name: ModuleType(name) for name in ("vllm", "vllm.v1")},
        "vllm.v1.outputs": outputs,
        "vllm.sampling_params": params,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def request(name: str, limit: int, **sampling: Any) -> SimpleNamespace:
    given = {
        **{"output_kind": FINAL_ONLY, "stop": [], "logprobs": 0, "logprob_token_ids": None, "prompt_logprobs": None},
        "prompt_logprob_token_ids": None,
    }
    return SimpleNamespace(
        request_id=name, limit=limit, sent=0, sampling_params=SimpleNamespace(**{**given, **sampling})
    )


def step(scheduler: Any, number: int, speculative: bool = False) -> dict[str, Output]:
    """One step: every request gets a token, or with ``speculative`` one to three; all ids and log-probs differ."""
    names = sorted(scheduler.requests)
    counts = [1 + (index + number) % 3 if speculative else 1 for index in range(len(names))]
    starts = [sum(counts[:index]) for index in range(len(names))]
    rows = sum(counts)
    ids = np.arange(rows, dtype=np.int32) + 1000 * number
    columns = np.stack([-(ids + 0.5), np.full(rows, 7.0)], axis=1).astype(np.float32)
    table = Table(np.stack([ids, ids], axis=1), columns, ids % 5, starts if speculative else None)
    sampled = [ids[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]
    runner = RunnerOutput({name: index for index, name in enumerate(names)}, sampled, table)
    messages = scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)), runner)
    assert runner.logprobs is table  # the runner's own result stays as it is
    return {output.request_id: output for message in messages.values() for output in message.outputs}


def whole(scheduler: Any, requests: list[Any], steps: int, speculative: bool) -> dict[str, list[Output]]:
    for each in requests:
        scheduler.add_request(each)
    sent: dict[str, list[Output]] = {each.request_id: [] for each in requests}
    for number in range(steps):
        for name, output in step(scheduler, number, speculative).items():
            sent[name].append(output)
    return sent


LIMITS = {"a": 1, "b": PIECE - 1, "c": PIECE, "d": PIECE + 1, "e": 3 * PIECE + 7}


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_pieces_hold_what_single_tokens_would(speculative: bool, streamed: bool) -> None:
    def requests() -> list[Any]:
        others = [request("f", 90, output_kind=DELTA), request("g", 50, logprobs=5)] if streamed else []
        return [*(request(name, limit) for name, limit in LIMITS.items()), request("h", 70, logprobs=None), *others]

    plain, pieces = Plain(), Pieces()
    expected = whole(plain, requests(), 3 * PIECE + 8, speculative)
    found = whole(pieces, requests(), 3 * PIECE + 8, speculative)
    assert not pieces._pieces and not pieces.requests
    for name, tokens in expected.items():
        sent = found[name]
        ids = [[token for each in every for token in each.new_token_ids] for every in (sent, tokens)]
        assert ids[0] == ids[1]
        assert [each.finish_reason for each in sent] == [None] * (len(sent) - 1) + ["length"]
        assert (sent[0].events, sent[0].prefill_stats) == (["scheduled"], "prefill")
        assert all(each.prefill_stats is None for each in sent[1:])
        if name == "h":
            assert all(each.new_logprobs is None for each in sent)
            continue
        for part in range(3):
            columns = [[each.new_logprobs[part] for each in every] for every in (sent, tokens)]
            if name not in ("f", "g") and part < 2:  # only the sampled token's column
                columns = [[table[:, :1] for table in every] for every in columns]
            assert np.array_equal(np.concatenate(columns[0]), np.concatenate(columns[1])), (name, part)
    if not streamed:
        assert pieces.cut == 0  # no slice for each request and step
        longest = [len(each.new_token_ids) for each in found["e"]]
        assert len(longest) == 4 and min(longest[:-1]) >= PIECE
        sizes = [part.nbytes for every in found.values() for each in every for part in (each.new_logprobs or ())[:3]]
        assert max(sizes) < INLINE_BYTES


@pytest.mark.parametrize(
    "sampling",
    [{"output_kind": DELTA}, {"stop": ["\n"]}, {"logprobs": 3}, {"prompt_logprobs": 0}, {"logprob_token_ids": [5]}],
    ids=lambda each: next(iter(each)),
)
def test_an_answer_whose_tokens_are_needed_immediately_is_not_batched(sampling: dict[str, Any]) -> None:
    scheduler = Pieces()
    scheduler.add_request(request("a", 9, **sampling))
    assert [len(step(scheduler, number)["a"].new_token_ids) for number in range(9)] == [1] * 9


def test_many_speculative_tokens_a_step_do_not_come_in_pieces() -> None:
    scheduler = Pieces(num_spec_tokens=16)
    scheduler.add_request(request("a", 3))
    assert len(step(scheduler, 0)["a"].new_token_ids) == 1


def test_an_aborted_request_leaves_nothing_behind() -> None:
    scheduler = Pieces()
    for name in "ab":
        scheduler.add_request(request(name, 9))
    assert step(scheduler, 0) == {}
    assert scheduler.finish_requests(["a"], "aborted") == [("a", 0)]
    assert list(scheduler._pieces) == ["b"]
    for number in range(1, 9):
        sent = step(scheduler, number)
    assert len(sent["b"].new_token_ids) == 9
