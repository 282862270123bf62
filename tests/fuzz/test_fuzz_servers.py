"""A small share of the fuzzing of ``benchmarks/fuzz_servers.py``: random bodies against a real engine and gateway."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rft_platform.common import json_codec
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.openai_api.schema import document
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from tests.fuzz.attack import Findings, attack
from tests.fuzz.bodies import ODD_TEXTS, Bodies

COUNT = 150


@pytest.fixture
def clients(policy_engine: PolicyEngine) -> Iterator[RecordingClients]:
    made = RecordingClients(policy_engine.base_url, 60, api_key=policy_engine.api_key)
    yield made
    made.close()


def check(found: Findings) -> None:
    assert found.failures == []
    assert found.requests == COUNT
    assert found.statuses[200] and found.statuses[400]


@pytest.mark.slow
def test_the_engine_never_fails_on_a_body(policy_engine: PolicyEngine) -> None:
    root, model = policy_engine.base_url.removesuffix("/v1"), policy_engine.status().model_path
    check(asyncio.run(attack(root, lambda: policy_engine.api_key, model, range(COUNT))))


@pytest.mark.slow
def test_the_gateway_never_fails_on_a_body(policy_engine: PolicyEngine, clients: RecordingClients) -> None:
    model, numbers = policy_engine.status().model_path, itertools.count()

    def key() -> str:
        history = RunHistory(model, SamplingParams(2), 1, f"r0001-b0000/t00000/{next(numbers):03d}")
        histories.append(history)  # a history is known by its identity
        return clients.gateway.register(history)

    histories: list[RunHistory] = []
    root = clients.gateway.base_url.removesuffix("/v1")
    check(asyncio.run(attack(root, key, model, range(COUNT, 2 * COUNT))))
    assert any(history.calls() for history in histories)


@given(st.integers(0, 2**32))
def test_bodies_are_made_for_every_seed(seed: int) -> None:
    path, body = Bodies(document(), "m").make(Random(seed))
    assert path.startswith("/v1/") and isinstance(body, bytes)


@pytest.mark.parametrize(
    "text", ["1e999", '[{"a": -2.5E+400}]', "1" + "0" * 400 + ".5", "9" * 299 + "e10", "[0, 12E308]", "-3.4e+309"]
)
def test_a_number_that_no_float_holds_is_refused(text: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(ValueError, match="beyond the largest float"):
            json_codec.parse(data)
    assert json_codec.parse(json_codec.dump(text)) == text  # in a text it is no number


@given(st.integers(1, 9), st.integers(-400, 400), st.sampled_from("eE"), st.sampled_from(["", "+"]))
def test_exactly_the_numbers_that_floats_hold_are_read(digit: int, power: int, mark: str, sign: str) -> None:
    text = f"[{digit}.5{mark}{sign if power >= 0 else ''}{power}]"
    if math.isfinite(float(text.strip("[]"))):
        assert json_codec.parse(text) == [float(text.strip("[]"))]
    else:
        with pytest.raises(ValueError, match="beyond the largest float"):
            json_codec.parse(text.encode())


@example(b"e1", 41)
@given(st.binary() | st.text().map(str.encode) | st.sampled_from(ODD_TEXTS), st.integers(0, 2**32))
def test_json_is_read_or_refused(data: bytes, seed: int) -> None:
    _, body = Bodies(document(), "m").make(Random(seed))
    place = seed % (len(body) + 1)
    try:
        value = json_codec.parse(body[:place] + data + body[place:])
    except ValueError:
        return
    assert json_codec.parse(json_codec.dump(value)) == value
