"""The rules of Werewolf for six players: two wolves and four villagers, one of whom may be a seer.

At night the wolves kill a player and the seer looks at one. By day every living player speaks once and votes once; the
player with most votes is out, a tie is decided by lot. Who leaves shows the role. The village wins when no wolf is
left, the wolves win when they are as many as the others.

A game follows from its seed and the answers of its players. An answer begins with an act that its request offers, as
``vote Bo`` or, by the place of Bo in the request, ``vote b``; words after a speech are free. Another answer is a pass:
silence, no vote, no victim.
"""

import random
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field

NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Fay")
PLACES = tuple("abcde")  # an act may name its target by its place among the request's targets
WOLF, VILLAGER, SEER = "wolf", "villager", "seer"
CLAIMS = (VILLAGER, SEER)
WORDS = 60  # longest free text of a speech, in characters


@dataclass(frozen=True, slots=True)
class Request:
    """What a player is asked for, and the acts that answer it."""

    player: str
    kind: str  # kill, look, speak or vote
    targets: tuple[str, ...]
    acts: tuple[str, ...]

    def chosen(self, answer: str) -> str | None:
        """The act with which an answer begins, with the target's name; None if it begins with none."""
        words = answer.replace(".", " ").replace(":", " ").split()[:2]
        if len(words) == 2 and words[1] in PLACES[: len(self.targets)]:
            words[1] = self.targets[PLACES.index(words[1])]
        act = " ".join(words)
        return act if act in self.acts else None

    def by_place(self, answer: str) -> str:
        """An answer that names its target by its place, as models do."""
        for place, target in zip(PLACES, self.targets, strict=False):
            answer = answer.replace(f" {target}", f" {place}", 1)
        return answer


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the game's record; only ``witnesses`` learn of it, None: everybody."""

    text: str
    witnesses: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Speech:
    """A public act of a day: ``kind`` is accuse, defend, claim, pass (silence) or vote.

    ``target`` is a player, the claimed role, or empty for a pass.
    """

    day: int
    player: str
    kind: str
    target: str


@dataclass(slots=True)
class Game:
    """One game. ``roles``, by player in the order of their seats, are dealt by the seed unless they are given."""

    seed: int
    seer: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    alive: list[str] = field(init=False)
    day: int = 0
    record: list[Event] = field(default_factory=list)
    speeches: list[Speech] = field(default_factory=list)
    voted_out: list[str] = field(default_factory=list)
    winner: str | None = None  # WOLF or VILLAGER

    def __post_init__(self) -> None:
        self.roles = self.roles or deal(self.seed, self.seer)
        self.alive = list(self.players)

    @property
    def players(self) -> tuple[str, ...]:
        """All players of the game."""
        return tuple(self.roles)

    def those(self, role: str) -> list[str]:
        """Living players of a role."""
        return [player for player in self.alive if self.roles[player] == role]

    def shown(self, player: str) -> str | None:
        """The role of a player who has left; None while the player lives."""
        return None if player in self.alive else self.roles[player]

    def play(self) -> Generator[Request, str, None]:
        """Yield what players are asked for, and receive their answers, until somebody has won."""
        lots = random.Random(f"lots {self.seed}")
        wolves = frozenset(player for player in self.players if self.roles[player] == WOLF)
        self._tell(f"The wolves are {' and '.join(sorted(wolves))}.", wolves)
        for seer in self.those(SEER):
            self._tell(f"{seer} is the seer.", frozenset({seer}))
        while self.winner is None:
            yield from self._night()
            if self.winner is None:
                yield from self._discuss(lots)
                yield from self._vote(lots)

    def news(self, observers: Collection[str], since: int = 0) -> str:
        """What at least one of the observers has learned since line ``since`` of the record."""
        lines = (event for event in self.record[since:] if event.witnesses is None or event.witnesses & set(observers))
        return "\n".join(event.text for event in lines)

    def accused(self) -> Counter[str]:
        """Accusations of this day by accused player."""
        return Counter(said.target for said in self.speeches if said.kind == "accuse" and said.day == self.day)

    def _night(self) -> Generator[Request, str, None]:
        self.day += 1
        self._tell(f"Night {self.day}.")
        for seer in self.those(SEER):
            seen = yield from self._ask(seer, "look", self._others(seer))
            if seen:
                is_wolf = self.roles[seen] == WOLF
                self._tell(f"{seen} is {'a' if is_wolf else 'no'} wolf.", frozenset({seer}))
        wolves = self.those(WOLF)
        victim = yield from self._ask(wolves[0], "kill", [each for each in self.alive if each not in wolves])
        self._leave(victim, "died")

    def _discuss(self, lots: random.Random) -> Generator[Request, str, None]:
        first = lots.randrange(len(self.alive))
        self._tell(f"Day {self.day}.")
        for player in (*self.alive[first:], *self.alive[:first]):
            others = self._others(player)
            acts = [f"{kind} {other}" for kind in ("accuse", "defend") for other in others]
            request = Request(player, "speak", tuple(others), (*acts, *(f"claim {role}" for role in CLAIMS)))
            answer = yield request
            act = request.chosen(answer)
            kind, target = act.split() if act else ("pass", "")
            self.speeches.append(Speech(self.day, player, kind, target))
            self._tell(f"{player}: {act}. {free_text(answer)}".rstrip() if act else f"{player} is silent.")

    def _vote(self, lots: random.Random) -> Generator[Request, str, None]:
        tally = self.accused()
        self._tell(f"Accused: {' '.join(f'{name} {tally[name]}' for name in self.alive if tally[name]) or 'nobody'}.")
        votes = {}
        for player in tuple(self.alive):
            target = yield from self._ask(player, "vote", self._others(player))
            if target:
                votes[player] = target
        self.speeches += [Speech(self.day, player, "vote", target) for player, target in votes.items()]
        count = Counter(votes.values())
        ballots = [f"{each} by {' '.join(name for name in votes if votes[name] == each)}" for each in sorted(count)]
        self._tell(f"Votes: {', '.join(ballots) or 'none'}.")
        most = [name for name in self.alive if count[name] == max(count.values(), default=0)]
        out = lots.choice(most)
        self.voted_out.append(out)
        self._leave(out, "is voted out")

    def _ask(self, player: str, kind: str, targets: list[str]) -> Generator[Request, str, str]:
        request = Request(player, kind, tuple(targets), tuple(f"{kind} {target}" for target in targets))
        act = request.chosen((yield request))
        return act.split()[1] if act else ""

    def _others(self, player: str) -> list[str]:
        return [each for each in self.alive if each != player]

    def _leave(self, player: str, how: str) -> None:
        if player:
            self.alive.remove(player)
            self._tell(f"{player} {how}, a {self.roles[player]}.")
        wolves = len(self.those(WOLF))
        if wolves == 0 or 2 * wolves >= len(self.alive):
            self.winner = WOLF if wolves else VILLAGER
            self._tell("The wolves win." if wolves else "The village wins.")

    def _tell(self, text: str, witnesses: frozenset[str] | None = None) -> None:
        self.record.append(Event(text, witnesses))


def deal(seed: int, seer: bool = False) -> dict[str, str]:
    """Six players and their roles."""
    generator = random.Random(f"roles {seed}")
    roles = [WOLF, WOLF, SEER if seer else VILLAGER, *[VILLAGER] * 3]
    generator.shuffle(roles)
    return dict(zip(generator.sample(NAMES, len(roles)), roles, strict=True))


def free_text(answer: str) -> str:
    """The words after the act, on one line and of limited length."""
    return " ".join(answer.replace(".", ". ", 1).split()[2:]).lstrip(".: ")[:WORDS]
