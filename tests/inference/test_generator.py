"""The decode loop on the real model, without HTTP."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.transformers_engine import generator as generator_module
from rft_platform.inference.transformers_engine import scheduler as scheduler_module
from rft_platform.inference.transformers_engine.generator import Generator
from rft_platform.inference.transformers_engine.model import PROMPT_TOKENS, PolicyModel, PromptBatch, plan_batches
from rft_platform.inference.transformers_engine.request import Request, TokenEvent
from rft_platform.inference.transformers_engine.scheduler import Scheduler, Served

MAX_LEN = 512
PROMPTS = [[7 + i, *range(20, 20 + length)] for i, length in enumerate((1, 40, 3, 3, 17, 90, 2))]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PolicyModel:
    torch.set_num_threads(1)
    return PolicyModel(tiny_model, torch.float32, torch.device("cpu"))


@pytest.fixture
def generator(model: PolicyModel) -> Generator:
    return Generator(model, [2], lambda ids: " ".join(map(str, ids)) + " ")


def request(prompts: list[list[int]], max_tokens: int = 12, **options: Any) -> Request:
    return Request(prompts, SamplingParams(max_tokens, **options), MAX_LEN)


def run(generator: Generator, *requests: Request) -> list[list[list[int]]]:
    """Admit all and step to the end; token ids by request and row."""
    for each in requests:
        generator.admit(each, each.rows)
    while generator.rows:
        generator.step()
    return [[c.token_ids for g in each.future.result() for c in g.completions] for each in requests]


def test_padded_and_single_rows_agree(model: PolicyModel) -> None:
    single = [model.score([prompt])[0] for prompt in PROMPTS]
    for one, together in zip(single, model.score(PROMPTS), strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(together), atol=1e-5)


def test_rows_of_any_length_decode_as_if_alone(generator: Generator, model: PolicyModel) -> None:
    together = request(PROMPTS, 30, n=3, seed=5)
    (tokens,) = run(generator, together)
    assert len({len(ids) for ids in tokens}) > 1  # some ended early: the gaps were closed
    for generation in together.future.result():
        for done in generation.completions:
            scores = model.score([generation.prompt_ids + done.token_ids])[0][len(generation.prompt_ids) :]
            assert torch.allclose(torch.tensor(done.logprobs), torch.tensor(scores), atol=1e-4)


@pytest.mark.slow
def test_joining_a_batch_under_way_changes_nothing(generator: Generator) -> None:
    alone = [run(generator, request([prompt], 20, n=2, seed=i))[0] for i, prompt in enumerate(PROMPTS)]
    staggered = [request([prompt], 20, n=2, seed=i) for i, prompt in enumerate(PROMPTS)]
    for each in staggered:
        generator.admit(each, each.rows)
        if generator.rows:
            generator.step()
    while generator.rows:
        generator.step()
    assert [[c.token_ids for g in each.future.result() for c in g.completions] for each in staggered] == alone


def test_a_request_may_be_admitted_in_parts(generator: Generator) -> None:
    (whole,) = run(generator, request(PROMPTS, n=3, seed=1))
    parts = request(PROMPTS, n=3, seed=1)
    for count in (2, 5, parts.rows - 7):
        generator.admit(parts, count)
    while generator.rows:
        generator.step()
    assert [c.token_ids for g in parts.future.result() for c in g.completions] == whole


def test_equal_prompts_are_forwarded_once(generator: Generator, model: PolicyModel, monkeypatch: Any) -> None:
    seen: list[int] = []
    read = model.read_prompts

    def counted(prompts: list[list[int]]) -> list[PromptBatch]:
        seen.append(len(prompts))
        return read(prompts)

    monkeypatch.setattr(model, "read_prompts", counted)
    run(generator, request([PROMPTS[0], PROMPTS[1], PROMPTS[0]], n=4))
    assert seen == [2]


@pytest.mark.slow
def test_long_answers_outgrow_the_first_buffers(generator: Generator, model: PolicyModel) -> None:
    long = request([PROMPTS[2]], 300, n=2, seed=4)
    generator.end_ids = torch.tensor([], dtype=torch.int64)
    (tokens,) = run(generator, long)
    assert [len(ids) for ids in tokens] == [300, 300]
    done = long.future.result()[0].completions[1]
    scores = model.score([PROMPTS[2] + done.token_ids])[0][len(PROMPTS[2]) :]
    assert torch.allclose(torch.tensor(done.logprobs), torch.tensor(scores), atol=1e-4)


def test_events_and_alternatives_follow_every_token(generator: Generator) -> None:
    events: list[TokenEvent] = []
    watched = Request([PROMPTS[0]], SamplingParams(5, n=2, seed=1, stop=("never",)), MAX_LEN, 3, events.append)
    (tokens,) = run(generator, watched)
    for row, ids in enumerate(tokens):
        mine = [event for event in events if event.row == row]
        assert [event.token_id for event in mine] == ids
        assert [event.finish_reason is not None for event in mine] == [False] * (len(ids) - 1) + [True]
        assert watched.tops[row] == [event.top for event in mine] and all(len(event.top) == 3 for event in mine)


def test_stop_strings_end_a_row(generator: Generator) -> None:
    (free,) = run(generator, request([PROMPTS[0]], 20, seed=3))
    stop = f" {free[0][4]} "
    (stopped,) = run(generator, request([PROMPTS[0]], 20, seed=3, stop=(stop,)))
    assert stopped[0] == free[0][: free[0].index(free[0][4], 1) + 1]


def test_a_vocabulary_too_large_for_one_piece(generator: Generator, monkeypatch: Any) -> None:
    (whole,) = run(generator, request(PROMPTS, n=2, seed=1))
    monkeypatch.setattr(PolicyModel, "rows_a_piece", 3)
    (pieces,) = run(generator, request(PROMPTS, n=2, seed=1))
    assert pieces == whole


def test_plan_batches_bounds_padding_and_size() -> None:
    lengths = [5, 100, 5, 6, 99, 7, 1]
    batches = plan_batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        real, padded = sum(lengths[i] for i in batch), len(batch) * max(lengths[i] for i in batch)
        assert padded <= real * 1.25
    assert max(map(len, plan_batches([PROMPT_TOKENS // 4] * 10))) == 4
    assert plan_batches([]) == [] and plan_batches([PROMPT_TOKENS * 2]) == [[0]]


@pytest.fixture
def scheduler(generator: Generator) -> Iterator[Scheduler]:
    scheduler = Scheduler(generator, Served(0, "d", Path("x")), max_rows=6, max_batch_tokens=400)
    yield scheduler
    scheduler.close()


@pytest.mark.slow
def test_a_large_request_runs_within_the_bounds(scheduler: Scheduler, generator: Generator, monkeypatch: Any) -> None:
    sizes: list[tuple[int, int]] = []
    step = generator.step

    def measured() -> None:
        sizes.append((len(generator.rows), generator.longest))
        step()

    monkeypatch.setattr(generator, "step", measured)
    large = request([PROMPTS[0], PROMPTS[5]], n=16, seed=1)
    scheduler.submit(large)
    assert [len(g.completions) for g in large.future.result(60)] == [16, 16]
    assert max(rows for rows, _ in sizes) == 6
    assert all(rows * longest <= 400 for rows, longest in sizes)


def test_an_update_waits_for_the_whole_of_a_started_request(scheduler: Scheduler) -> None:
    scheduler.pause("keep").result(10)
    scheduler.resume()
    large, later = request([PROMPTS[0]], n=30), request([PROMPTS[0]])
    scheduler.call(lambda: scheduler.submit(large)).result(10)
    scheduler.call(lambda: None).result(10)  # a turn has begun it
    update = scheduler.update(lambda: Served(1, "e", Path("y")))
    scheduler.submit(later)
    assert {g.policy_version for g in large.future.result(60)} == {0}
    assert update.result(10).policy_version == 1
    assert later.future.result(60)[0].policy_version == 1


def test_a_failed_update_keeps_the_version(scheduler: Scheduler) -> None:
    def fail() -> Served:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        scheduler.update(fail).result(10)
    assert scheduler.served.policy_version == 0


def test_a_failed_step_fails_its_requests_and_the_engine_continues(
    scheduler: Scheduler, generator: Generator, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "next_hidden", lambda *_: 1 / 0)
        broken = request([PROMPTS[0]])
        scheduler.submit(broken)
        with pytest.raises(ZeroDivisionError):
            broken.future.result(10)
    healthy = request([PROMPTS[0]])
    scheduler.submit(healthy)
    assert healthy.future.result(30)


def test_a_cancelled_request_ends_and_a_closed_engine_answers(scheduler: Scheduler) -> None:
    scheduler.pause("keep").result(10)
    held = request([PROMPTS[0]], 400)
    scheduler.submit(held)
    scheduler.cancel(held)
    assert held.future.result(10)[0].completions[0].finish_reason == "abort"
    waiting = request([PROMPTS[0]])
    scheduler.submit(waiting)
    scheduler.close()
    with pytest.raises(EngineError, match="shut"):
        waiting.future.result(10)
    late = request([PROMPTS[0]])
    scheduler.submit(late)
    with pytest.raises(EngineError, match="shutting down"):
        late.future.result(10)


def cache_size(generator: Generator) -> int:
    rows, tokens = generator.cache.capacity
    return rows * tokens


@pytest.mark.slow
def test_a_large_batch_does_not_keep_its_cache_under_load(generator: Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(generator_module, "REVIEW_STEPS", 20)
    (alone,) = run(generator, request(PROMPTS[:2], 60, seed=3))
    small = request(PROMPTS[:2], 60, seed=3)
    generator.admit(small, 2)
    run_beside = request([PROMPTS[5]], 2, n=200)
    generator.admit(run_beside, 200)
    largest = cache_size(generator)
    while generator.rows:
        generator.step()
    assert cache_size(generator) < largest / 4
    assert [c.token_ids for g in small.future.result() for c in g.completions] == alone  # the rows kept their contents


@pytest.mark.slow
def test_rows_that_may_still_grow_keep_their_cache(generator: Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(generator_module, "REVIEW_STEPS", 2)
    generator.end_ids = torch.tensor([], dtype=torch.int64)
    run(generator, request([PROMPTS[0]], 300, n=4))
    grown = cache_size(generator)
    run(generator, request([PROMPTS[0]], 300, n=4))
    assert cache_size(generator) == grown


def test_an_idle_engine_gives_the_cache_back(scheduler: Scheduler, generator: Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.05)
    first, again = request([PROMPTS[1]], n=4, seed=2), request([PROMPTS[1]], n=4, seed=2)
    scheduler.submit(first)
    before = first.future.result(30)
    deadline = time.monotonic() + 10
    while cache_size(generator) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert cache_size(generator) == 0
    scheduler.submit(again)
    assert again.future.result(30) == before


def test_longrope_ends_at_its_original_length(tmp_path: Path) -> None:
    """Beyond it a long row changes the frequencies of all rows, so log-probs would depend on the other rows."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, **factors}
    limits = {"max_position_embeddings": 256, "original_max_position_embeddings": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Phi3Config(**sizes, **ids, num_attention_heads=4, **limits, rope_parameters=rope)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    assert PolicyModel(tmp_path, torch.float32, torch.device("cpu")).max_positions == 16
