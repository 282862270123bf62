"""Which call a repeated request is: two equal ones may be under way at once."""

from rft_platform.rollout.recording.history import CallSlots, Sending


def end(sending: Sending, answered: bool = False) -> None:
    sending.slot.under_way, sending.slot.answered = False, answered


def test_a_call_under_way_keeps_its_place() -> None:
    slots = CallSlots()
    first, second = slots.take("a", 0, False), slots.take("a", 0, False)
    end(first)
    again = slots.take("a", 1, False)
    assert again.slot is first.slot and not first.counts and again.counts and second.counts
    assert slots.take("a", 1, False).slot not in (first.slot, second.slot)  # both are under way


def test_an_answer_lost_on_the_way_is_replaced_where_it_is_clear_whose() -> None:
    slots = CallSlots()
    first = slots.take("a", 0, False)
    end(first, answered=True)
    assert slots.take("a", 1, False).slot is first.slot
    end(first, answered=True)
    other = slots.take("a", 0, False)
    assert other.slot is not first.slot
    end(other, answered=True)
    assert slots.take("a", 1, False).slot not in (first.slot, other.slot)


def test_a_name_says_it_all() -> None:
    slots = CallSlots()
    first = slots.take("key", 0, True)
    assert slots.take("key", 0, True).slot is first.slot  # still under way: the client has lost the connection
    assert slots.unfinished == 1
    first.slot.refused = True
    assert slots.unfinished == 0
