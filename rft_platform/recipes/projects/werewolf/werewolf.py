"""The environment of the recipe: one game, in which the policy plays both wolves against a village of scripts."""

import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from game import PLACES, WOLF, Game, Request
from players import VILLAGES
from rft_platform.rollout.environments.interface import Action, Turn
from scoring import metrics, reward

ASKED = {"kill": "Choose a victim, {}:", "look": "Look at a player, {}:", "speak": "Speak, {}:", "vote": "Vote, {}:"}


class Conversation:
    """What some players see of a game: each observation holds what is new to them, and what one of them is asked."""

    def __init__(self, game: Game, *players: str) -> None:
        self.game, self.players, self._read = game, players, 0

    def observation(self, request: Request | None) -> str:
        """The news since the last observation; the last line asks for an act, unless the game has ended."""
        news = self.game.news(self.players, self._read)
        self._read = len(self.game.record)
        return news if request is None else f"{news}\n{asked(request)}".lstrip()


def asked(request: Request) -> str:
    """The line that asks a player, with the players whom the act can be about and their places."""
    places = (f"{place} {target}" for place, target in zip(PLACES, request.targets, strict=False))
    return f"{ASKED[request.kind].format(request.player)} {', '.join(places)}."


class Werewolf:
    """A game whose wolves are played by the policy, in one conversation: they may confer.

    Args:
        village: the script of the villagers, one of ``players.VILLAGES``.
        seer: whether one of the villagers is a seer.
    """

    tools: Sequence[dict[str, Any]] = ()  # an act is the text of an answer

    def __init__(self, village: str = "rule", seer: bool = False) -> None:
        if village not in VILLAGES:
            raise ValueError(f"village {village!r}: expected one of {', '.join(VILLAGES)}")
        self._village, self._seer = VILLAGES[village], seer
        self.request: Request | None = None

    def start(self, seed: int) -> Turn:
        """Start the game of this seed."""
        self.game = Game(seed, self._seer)
        self._generators = {player: random.Random(f"{seed} {player}") for player in self.game.players}
        self._wolves = Conversation(self.game, *self.game.those(WOLF))
        self._play: Generator[Request, str, None] = self.game.play()
        self.request = next(self._play)
        return self._turn(0.0, True)

    def act(self, answer: str) -> Turn:
        """Give the answer of the wolf that was asked. Its reward is what it and the village's answers brought about."""
        assert self.request is not None, "the game has ended"
        before, valid = reward(self.game), self.request.chosen(answer) is not None
        self._answer(answer)
        return self._turn(before, valid)

    def _turn(self, before: float, valid: bool) -> Turn:
        while self.request is not None and self.request.player not in self._wolves.players:
            self._answer(self._village(self.game, self.request, self._generators[self.request.player]))
        observation, ended = self._wolves.observation(self.request), self.request is None
        return Turn(observation, reward(self.game) - before, ended, valid, metrics(self.game) if ended else {})

    def _answer(self, answer: str) -> None:
        try:
            self.request = self._play.send(answer)
        except StopIteration:
            self.request = None

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Start the game of the row's ``seed``."""
        return self.start(int(row["seed"]))

    async def step(self, action: Action) -> Turn:
        """Give a wolf's answer."""
        return self.act(str(action))

    async def close(self) -> None:
        """A game holds nothing."""
