"""A game in which models play both sides: the workflow of ``village.yaml``, where the village learns too."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from game import WOLF, Game, Request
from players import VILLAGES, WOLVES
from rft_platform.rollout.workflow import WorkflowOutput
from scoring import metrics, reward
from werewolf import Conversation

LEARNER = "policy"  # the first policy of the run


class Sides:
    """Each game draws who plays the wolves and who plays the village; the learner is one of them.

    The wolves share a conversation, because they may confer; each villager has one. The reward is that of the wolves,
    or its negative if the village learns.

    Args:
        wolves: names of section ``policies`` or of ``players.WOLVES``, or only ``policy``.
        village: the same with ``players.VILLAGES``.
        seer: whether one of the villagers is a seer.
    """

    def __init__(self, wolves: Sequence[str], village: Sequence[str], seer: bool = False) -> None:
        if (wolves == [LEARNER]) == (village == [LEARNER]):
            raise ValueError(f"wolves {wolves}, village {village}: expected [{LEARNER}] as one of them")
        self._wolves, self._village, self._seer = wolves, village, seer

    async def run(self, task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None) -> WorkflowOutput:
        """Play the game of the task's ``seed``."""
        game, lots = Game(int(task.raw["seed"]), self._seer), random.Random(f"sides {task.raw['seed']}")
        names = {True: lots.choice(self._wolves), False: lots.choice(self._village)}
        pack = _Talk(game, task.prompt, *game.those(WOLF))
        talks = {name: pack if game.roles[name] == WOLF else _Talk(game, task.prompt, name) for name in game.players}
        play = game.play()
        request: Request | None = next(play)
        while request is not None:
            is_wolf = game.roles[request.player] == WOLF
            script = (WOLVES if is_wolf else VILLAGES).get(names[is_wolf])
            if script is not None:
                answer = script(game, request, lots)
            else:
                name = names[is_wolf]
                answer = await talks[request.player].answer(model if name == LEARNER else model.policy(name), request)
            try:
                request = play.send(answer)
            except StopIteration:
                request = None
        sign = 1.0 if self._wolves == [LEARNER] else -1.0
        return WorkflowOutput(reward=sign * reward(game), response=game.news(game.players), metrics=metrics(game))


class _Talk:
    """The conversation of some players with their model."""

    def __init__(self, game: Game, prompt: str, *players: str) -> None:
        self._seen, self._prompt = Conversation(game, *players), prompt
        self._messages: list[dict[str, Any]] = []

    async def answer(self, model: Any, request: Request) -> str:
        opening = "" if self._messages else f"{self._prompt}\n\n"
        self._messages.append({"role": "user", "content": opening + self._seen.observation(request)})
        message = await model.chat(self._messages)
        self._messages.append(message)
        return message.get("content") or ""
