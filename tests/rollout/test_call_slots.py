"""Which call a repeated request is: two equal ones may be under way at once."""

from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.history import CallSlots, RunHistory, Sending


def end(sending: Sending, answered: bool = False) -> None:
    sending.slot.under_way, sending.slot.answered = False, answered


def test_an_unfinished_call_keeps_its_place() -> None:
    slots = CallSlots()
    first, second = slots.take("a", 0, False), slots.take("a", 0, False)
    end(first)
    again = slots.take("a", 1, False)
    assert again.slot is first.slot and not first.counts and again.counts and second.counts
    assert slots.take("a", 1, False).slot not in (first.slot, second.slot)  # both are under way


def test_a_repeated_call_replaces_its_lost_answer_unless_ambiguous() -> None:
    slots = CallSlots()
    first = slots.take("a", 0, False)
    end(first, answered=True)
    assert slots.take("a", 1, False).slot is first.slot
    end(first, answered=True)
    other = slots.take("a", 0, False)
    assert other.slot is not first.slot
    end(other, answered=True)
    assert slots.take("a", 1, False).slot not in (first.slot, other.slot)


def test_a_repeated_unfinished_call_gets_the_same_slot() -> None:
    slots = CallSlots()
    first = slots.take("key", 0, True)
    assert slots.take("key", 0, True).slot is first.slot  # still under way: the client has lost the connection
    assert slots.unfinished == 1
    first.slot.refused = True
    assert slots.unfinished == 0


def call(name: str, order: int) -> ModelCall:
    return ModelCall(name, [1], [2], [-0.5], "stop", 1.0, 1.0, -1, [], [], {}, order=order)


def test_an_answer_after_the_end_of_its_run_is_not_recorded() -> None:
    history = RunHistory("model", SamplingParams(1), 0)
    first, second = history.begin_call(), history.begin_call()
    history.add(first, [call("in time", first.order)])
    history.close()
    history.add(second, [call("late", second.order)])
    assert [each.msg_id for each in history.calls()] == ["in time"]


def test_the_new_answer_to_an_extracted_call_is_extracted() -> None:
    history = RunHistory("model", SamplingParams(1), 0)
    first = history.begin_call("a")
    history.add(first, [call("lost", first.order)])
    history.end_call(first)
    assert [each.msg_id for each in history.extract()] == ["lost"]
    retry = history.begin_call("a", sent_before=1)
    history.add(retry, [call("again", retry.order)])
    assert [each.msg_id for each in history.extract(clear=False)] == ["again"]
    second = history.begin_call("b")
    history.add(second, [call("next", second.order)])
    assert [each.msg_id for each in history.extract()] == ["again", "next"] and history.extract() == []
