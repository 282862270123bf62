"""Demonstrations of legal play: conversations of wolves and of villagers who act at random, without any skill."""

import random
from collections.abc import Iterator
from typing import Any

from game import WOLF, Game, Request
from players import anybody, villager
from werewolf import Conversation

Messages = list[dict[str, Any]]
QUESTION = "Werewolf, game {}."  # a task's prompt: the conversations of its game begin with it


def conversations(seeds: range) -> Iterator[Messages]:
    """In every second game the conversation of the wolves, in the others that of a villager.

    Who demonstrates acts at random; other villagers follow the village's rule, other wolves act at random.
    """
    for seed in seeds:
        game, generator = Game(seed, seer=seed % 4 == 1), random.Random(f"demonstration {seed}")
        others = [player for player in game.players if game.roles[player] != WOLF]
        yield conversation(game, game.those(WOLF) if seed % 2 == 0 else [generator.choice(others)], generator)


def conversation(game: Game, shown: list[str], generator: random.Random) -> Messages:
    """Play the game; return the requests to the players ``shown`` and their random answers."""
    seen, messages, play = Conversation(game, *shown), Messages(), game.play()
    request: Request | None = next(play)
    while request is not None:
        at_random = request.player in shown or game.roles[request.player] == WOLF
        answer = (anybody if at_random else villager)(game, request, generator)
        if request.player in shown:
            opening = "" if messages else f"{QUESTION.format(game.seed)}\n\n"
            messages.append({"role": "user", "content": opening + seen.observation(request)})
            messages.append({"role": "assistant", "content": request.by_place(answer)})
        try:
            request = play.send(answer)
        except StopIteration:
            request = None
    return messages
