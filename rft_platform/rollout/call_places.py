"""Positions of model calls within their run; a retried request keeps the position of its first send."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class CallPlace:
    """A call's position in its run; a client that sends its request again keeps it."""

    order: int
    times: int = 1  # how often it was sent
    under_way: bool = True  # the last send, the one that counts, has not ended
    answered: bool = False  # its answer is recorded
    refused: bool = False  # by the engine or by the recorder


@dataclass(frozen=True, slots=True)
class Sending:
    """The ``time``-th send of a call."""

    place: CallPlace
    time: int

    @property
    def order(self) -> int:
        """Position of the call in its run, by the time of its first send."""
        return self.place.order

    @property
    def counts(self) -> bool:
        """Whether this is the latest send of the call."""
        return self.time == self.place.times


class CallPlaces:
    """All call positions of a run. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._order = count()
        self._by_request: dict[Hashable, list[CallPlace]] = {}

    def take(self, asked: Hashable, sent_before: int, named: bool) -> Sending:
        """Return the place of the call that ``asked`` identifies; its client has already sent it ``sent_before`` times.

        ``named``: ``asked`` is the client's own name for the call, so an equal ``asked`` is the same call.
        """
        places = self._by_request.setdefault(asked, [])
        place = places[-1] if named and places else _lost(places, sent_before) if sent_before else None
        if place is None:
            place = CallPlace(next(self._order))
            places.append(place)
        else:
            place.times += 1
            place.under_way, place.refused = True, False
        return Sending(place, place.times)

    @property
    def unfinished(self) -> int:
        """Number of calls without an answer or a refusal."""
        places = (place for places in self._by_request.values() for place in places)
        return sum(not (place.answered or place.refused) for place in places)


def _lost(places: list[CallPlace], sent_before: int) -> CallPlace | None:
    """Find the call that is being retried: one that has ended without an answer.

    The answer may also have been lost after it was recorded; then the call must be unambiguous. A call under way has a
    client that waits for it, so an equal request is another call.
    """
    ended = [place for place in places if not place.under_way and place.times <= sent_before]
    unanswered = [place for place in ended if not place.answered]
    if unanswered:
        return unanswered[-1]
    return ended[0] if ended and len(places) == 1 else None
