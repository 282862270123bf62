"""Which call a repeated request is: two equal ones may be under way at once."""

from rft_platform.rollout.call_places import CallPlaces, Sending


def end(sending: Sending, answered: bool = False) -> None:
    sending.place.under_way, sending.place.answered = False, answered


def test_a_call_under_way_keeps_its_place() -> None:
    places = CallPlaces()
    first, second = places.take("a", 0, False), places.take("a", 0, False)
    end(first)
    again = places.take("a", 1, False)
    assert again.place is first.place and not first.counts and again.counts and second.counts
    assert places.take("a", 1, False).place not in (first.place, second.place)  # both are under way


def test_an_answer_lost_on_the_way_is_replaced_where_it_is_clear_whose() -> None:
    places = CallPlaces()
    first = places.take("a", 0, False)
    end(first, answered=True)
    assert places.take("a", 1, False).place is first.place
    end(first, answered=True)
    other = places.take("a", 0, False)
    assert other.place is not first.place
    end(other, answered=True)
    assert places.take("a", 1, False).place not in (first.place, other.place)


def test_a_name_says_it_all() -> None:
    places = CallPlaces()
    first = places.take("key", 0, True)
    assert places.take("key", 0, True).place is first.place  # still under way: the client has lost the connection
    assert places.unfinished == 1
    first.place.refused = True
    assert places.unfinished == 0
