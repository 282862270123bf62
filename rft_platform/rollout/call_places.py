"""The places of model calls among the calls of their run, and which place a repeated request takes."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class CallPlace:
    """The place of a call among the calls of its run; a client that sends its request again keeps it."""

    order: int
    times: int = 1  # how often it was sent
    under_way: bool = True  # the sending that counts, the last one, has not ended
    answered: bool = False  # with an answer that is recorded
    refused: bool = False  # by the engine or by the recorder


@dataclass(frozen=True, slots=True)
class Sending:
    """A call sent for the ``time``-th time."""

    place: CallPlace
    time: int

    @property
    def order(self) -> int:
        """The call's place among the calls of its run, by the time it was sent first."""
        return self.place.order

    @property
    def counts(self) -> bool:
        """Whether the call has not been sent again since."""
        return self.time == self.place.times


class CallPlaces:
    """All places of a run. Not locked: its owner is."""

    def __init__(self) -> None:
        self._order = count()
        self._by_request: dict[Hashable, list[CallPlace]] = {}

    def take(self, asked: Hashable, sent_before: int, named: bool) -> Sending:
        """A place for a call that ``asked`` identifies, sent ``sent_before`` times already by its client's count.

        ``named``: ``asked`` is the client's own name for the call, so that it can be no other one.
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
        """Calls that have neither an answer nor a refusal."""
        places = (place for places in self._by_request.values() for place in places)
        return sum(not (place.answered or place.refused) for place in places)


def _lost(places: list[CallPlace], sent_before: int) -> CallPlace | None:
    """The place of the call that is sent again: one that has ended, and without an answer.

    An answer may have been lost behind the recorder, too; then it must be clear which call is meant. One that is under
    way has a client that waits for it, so it is another call that asks the same.
    """
    ended = [place for place in places if not place.under_way and place.times <= sent_before]
    unanswered = [place for place in ended if not place.answered]
    if unanswered:
        return unanswered[-1]
    return ended[0] if ended and len(places) == 1 else None
