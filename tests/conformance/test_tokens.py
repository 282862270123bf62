"""The token plane: ids in, ids and log-probs out."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import PartialBatch, SamplingParams
from rft_platform.inference.vllm_engine.scheduler import PIECE

from .conftest import (
    DTYPE,
    EXACT,
    HALF_DELTA,
    MAX_MODEL_LEN,
    PROMPTS,
    TOOL_QUESTION,
    TOOLS,
    Reference,
    close,
    ids_of,
    same,
)


def test_status_describes_the_engine(engine: EngineClient, tiny_model: Path) -> None:
    status = engine.status()
    assert status.engine.partition("-")[0] in ("transformers", "vllm")
    assert status.model_path == str(tiny_model) == status.weights_path
    assert status.dtype == DTYPE and status.max_model_len == MAX_MODEL_LEN
    assert status.policy_version == 0 and not status.paused
    assert len(status.weights_digest) == len(status.template_hash) == 64
    assert status.pid > 0 and status.cpu_seconds > 0 and 0 < status.started_at < time.time()


def test_score_equals_a_plain_forward(engine: EngineClient, reference: Reference) -> None:
    for prompt, scores in zip(PROMPTS, engine.score(PROMPTS), strict=True):
        assert close(scores, reference.logprobs(prompt))
    assert engine.score([[5]]) == [[0.0]] and engine.score([]) == []


def test_logprobs_of_samples_equal_a_plain_forward(engine: EngineClient, reference: Reference) -> None:
    for generation in engine.generate(PROMPTS, SamplingParams(12, n=3, seed=5)):
        for done in generation.completions:
            expected = reference.logprobs(generation.prompt_ids + done.token_ids)[len(generation.prompt_ids) :]
            assert close(done.logprobs, expected)


def test_long_answers_of_mixed_lengths_have_the_logprobs_of_a_plain_forward(
    engine: EngineClient, reference: Reference
) -> None:
    # vLLM passes long answers on in pieces: these end in the middle of a piece, at its end, and after several.
    limits = (1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 6)
    asked = [SamplingParams(limit, n=2, seed=limit) for limit in limits]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda each: engine.generate([each[0]], each[1])[0], zip(PROMPTS, asked, strict=True)))
    for generation, sampling in zip(found, asked, strict=True):
        for done in generation.completions:
            assert len(done.token_ids) == sampling.max_tokens or done.token_ids[-1] == 2
            expected = reference.logprobs(generation.prompt_ids + done.token_ids)[len(generation.prompt_ids) :]
            assert close(done.logprobs, expected)


def test_logprobs_are_those_of_the_sampling_distribution(engine: EngineClient, reference: Reference) -> None:
    import torch

    (generation,) = engine.generate(PROMPTS[:1], SamplingParams(8, temperature=0.5, top_k=4, seed=1))
    ids = generation.prompt_ids + generation.completions[0].token_ids
    logits = reference.logits(ids)[len(PROMPTS[0]) - 1 : -1] / 0.5
    top = logits.topk(4).values
    chosen = logits.gather(-1, torch.tensor(generation.completions[0].token_ids)[:, None])
    assert (chosen >= top[:, -1:] - (0 if EXACT else HALF_DELTA)).all()  # 16 bits may tie the fourth with the fifth
    assert close(generation.completions[0].logprobs, (chosen - top.logsumexp(-1, keepdim=True)).squeeze(-1).tolist())


def test_greedy_takes_the_likeliest_and_reports_temperature_one(engine: EngineClient, reference: Reference) -> None:
    (generation,) = engine.generate(PROMPTS[:1], SamplingParams(6, n=2, temperature=0.0))
    for done in generation.completions:
        ids = done.token_ids
        likeliest = reference.logits([*PROMPTS[0], *ids]).argmax(-1).tolist()
        assert same([ids], [likeliest[len(PROMPTS[0]) - 1 : -1]])
        assert close(done.logprobs, reference.logprobs([*PROMPTS[0], *ids])[len(PROMPTS[0]) :])


def test_same_seed_gives_the_same_answers_whatever_else_is_in_the_batch(engine: EngineClient) -> None:
    sampling = SamplingParams(16, n=4, seed=11)
    whole = engine.generate(PROMPTS, sampling)
    again = engine.generate(PROMPTS, sampling)
    alone = engine.generate(PROMPTS[:1], sampling)
    assert same(ids_of(whole), ids_of(again))
    assert same(ids_of(alone), ids_of(whole[:1]))
    for one, other in zip(alone[0].completions, whole[0].completions, strict=True):
        if one.token_ids == other.token_ids:
            assert close(one.logprobs, other.logprobs, 1e-5)


def test_part_of_a_batch_is_sampled_as_in_the_batch(engine: EngineClient) -> None:
    whole = engine.generate(PROMPTS, SamplingParams(16, n=4, seed=11))
    part = engine.generate(PROMPTS[2:4], SamplingParams(16, n=4, seed=11, first_prompt=2))
    assert same(ids_of(part), ids_of(whole[2:4]))


def test_choices_prompts_and_seeds_differ(engine: EngineClient) -> None:
    first, second = engine.generate([PROMPTS[2]] * 2, SamplingParams(16, n=4, seed=1))
    (other,) = engine.generate([PROMPTS[2]], SamplingParams(16, n=4, seed=2))
    answers = [tuple(c.token_ids) for g in (first, second, other) for c in g.completions]
    assert len(set(answers)) == len(answers)


def test_without_a_seed_answers_vary(engine: EngineClient) -> None:
    one, two = (engine.generate(PROMPTS[:1], SamplingParams(16)) for _ in range(2))
    assert one[0].completions[0].token_ids != two[0].completions[0].token_ids


@pytest.mark.usefixtures("restored")
def test_length_ends_an_answer_and_the_end_token_is_part_of_it(engine: EngineClient, memorised: Path) -> None:
    engine.update_weights(memorised, 1)
    prompts = engine.render([TOOL_QUESTION], TOOLS)
    for limit, reason in ((4, "length"), (60, "stop")):
        (generation,) = engine.generate(prompts, SamplingParams(limit, n=4, seed=3))
        for completion in generation.completions:
            assert completion.finish_reason == reason
            assert len(completion.token_ids) == len(completion.logprobs) <= limit
            assert (completion.token_ids[-1] == 2) == (reason == "stop")
            assert 2 not in completion.token_ids[:-1]
            assert len(completion.token_ids) == limit or reason == "stop"


def test_stop_strings_end_an_answer_with_their_last_token(engine: EngineClient) -> None:
    free = engine.generate(PROMPTS[:1], SamplingParams(60, n=8, seed=9))[0].completions
    texts = engine.decode([completion.token_ids for completion in free])
    index, stop = next(
        (index, text[i : i + 2])
        for index, text in enumerate(texts)
        for i in range(8, len(text) - 1)
        if text[i : i + 2].isascii() and text[i : i + 2] not in text[: i + 1]
    )
    stopped = engine.generate(PROMPTS[:1], SamplingParams(60, n=8, seed=9, stop=(stop,)))[0].completions[index]
    shown = engine.decode([stopped.token_ids, stopped.token_ids[:-1]])
    assert stopped.finish_reason == "stop" and stop in shown[0] and stop not in shown[1]
    assert free[index].token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_answers_stop_at_the_end_of_the_context(engine: EngineClient) -> None:
    prompt = [50] * (MAX_MODEL_LEN - 3)
    (generation,) = engine.generate([prompt], SamplingParams(100, seed=1))
    assert len(generation.completions[0].token_ids) <= 3
    assert generation.completions[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([50] * MAX_MODEL_LEN, f"{MAX_MODEL_LEN} tokens"),
        ([], "the prompt is empty"),
        ([1 << 20], "token ids must lie"),
        ([-1], "token ids"),
    ],
)
def test_bad_prompts_are_refused(engine: EngineClient, prompt: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.generate([PROMPTS[0], prompt], SamplingParams(4))


def test_render_and_decode_in_bulk(engine: EngineClient, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    conversations = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(20)]
    rendered = engine.render(conversations)
    for messages, ids in zip(conversations, rendered, strict=True):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert engine.decode(rendered)[3] == tokenizer.decode(rendered[3], skip_special_tokens=True)
    assert engine.decode([]) == [] and engine.render([]) == []


def test_the_metrics_count_requests_and_tokens(engine: EngineClient) -> None:
    before = engine.metrics()
    done = engine.generate(PROMPTS[:2], SamplingParams(4, n=2))
    after = engine.metrics()
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(map(len, PROMPTS[:2]))
    sampled = sum(len(c.token_ids) for g in done for c in g.completions)
    assert after["completion_tokens"] - before["completion_tokens"] == sampled
    assert after["generate_seconds"] > before["generate_seconds"]


def test_a_partial_batch_ends_with_its_groups_and_can_be_continued(engine: EngineClient, reference: Reference) -> None:
    limits = [2, 2, 60, 60]  # the answers of the first group end at once, those of the second one do not
    prompts, room = [PROMPTS[0]] * 4, 61
    partial = PartialBatch([0, 0, 1, 1], 1, 4, [room - limit for limit in limits])
    found = engine.generate(prompts, SamplingParams(room, seed=3), partial)
    first = [each.completions[0] for each in found]
    assert [done.finish_reason == "abort" for done in first] == [False, False, True, True]
    assert all(len(done.token_ids) <= limit for done, limit in zip(first, limits, strict=True))
    begun = [each.prompt_ids + done.token_ids for each, done in zip(found, first, strict=True)][2:]
    before = [room - 60 + len(done.token_ids) for done in first[2:]]
    rest = engine.generate(begun, SamplingParams(room, seed=4), PartialBatch([1, 1], 1, 2, before))
    for begin, (prompt, again) in zip(first[2:], zip(begun, rest, strict=True), strict=True):
        done = again.completions[0]
        assert done.finish_reason in ("stop", "length")
        assert len(begin.token_ids) + len(done.token_ids) <= 60
        assert (done.finish_reason == "length") == (len(begin.token_ids) + len(done.token_ids) == 60)
        whole = reference.logprobs(prompt + done.token_ids)[len(PROMPTS[0]) :]
        assert close(begin.logprobs + done.logprobs, whole)


def test_a_partial_batch_that_wants_all_groups_is_a_whole_batch(engine: EngineClient) -> None:
    sampling = SamplingParams(12, n=2, seed=5)
    whole = ids_of(engine.generate(PROMPTS, sampling))
    early = PartialBatch(list(range(len(PROMPTS))), len(PROMPTS), len(PROMPTS), [0] * len(PROMPTS))
    assert same(whole, ids_of(engine.generate(PROMPTS, sampling, early)))


def test_the_prompts_of_a_partial_batch_wait_until_others_have_ended(engine: EngineClient) -> None:
    prompts = [PROMPTS[0]] * 8
    partial = PartialBatch([0, 0, 0, 0, 1, 1, 1, 1], 1, 1, [0] * 8)
    found = [each.completions[0] for each in engine.generate(prompts, SamplingParams(40, seed=3), partial)]
    assert sum(len(done.token_ids) for done in found[:4]) > 40
    assert all(done.finish_reason != "abort" for done in found[:4])
    assert sum(len(done.token_ids) for done in found[4:]) < 10
    assert [done.token_ids for done in found[5:]] == [[]] * 3
