"""Scripted players: the village's rule, players that act at random, and simple strategies to test a trained side with.

A script answers a request of a game. It uses what its player may know: the public speeches and, for a wolf, the wolves.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from game import WOLF, Game, Request

Script = Callable[[Game, Request, random.Random], str]

TALK = ("", "", "Too quiet.", "I trust nobody.", "Watch the votes.")
# The village's rule. A player who has nothing to hide accuses; a defence, a claim or silence is suspicious. SLIP is the
# share of speeches in which a villager defends or claims nevertheless, such that wolves that act at random win half.
SLIP = 0.32
TODAY, EARLIER, ACCUSED, FOUND = 2.0, 0.5, 1.0, 1.0


def suspicion(game: Game) -> dict[str, float]:
    """How much the village suspects each living player, from the public speeches alone.

    A speech that does not accuse counts 2 on its day and 0.5 later, an accusation on this day counts 1 against the
    accused, and an accusation or vote against a wolf who has left counts 1 in favour of its author.
    """
    level = dict.fromkeys(game.alive, 0.0)
    for said in game.speeches:
        is_today = said.day == game.day
        if said.player in level and said.kind not in ("accuse", "vote"):
            level[said.player] += TODAY if is_today else EARLIER
        elif said.player in level and game.shown(said.target) == WOLF:
            level[said.player] -= FOUND
        if said.kind == "accuse" and is_today and said.target in level:
            level[said.target] += ACCUSED
    return level


def villager(game: Game, request: Request, generator: random.Random) -> str:
    """Accuse and vote for the most suspected player; in a share ``SLIP`` of the speeches defend or claim at random."""
    if request.kind == "look":
        return generator.choice(request.acts)
    if request.kind == "speak" and generator.random() < SLIP:
        return spoken(generator.choice([act for act in request.acts if not act.startswith("accuse")]), generator)
    level = suspicion(game)
    others = [player for player in game.alive if player != request.player]
    highest = max(level[player] for player in others)
    target = generator.choice([player for player in others if level[player] == highest])
    return spoken(f"accuse {target}", generator) if request.kind == "speak" else f"vote {target}"


def anybody(game: Game, request: Request, generator: random.Random) -> str:
    """Any legal act; each kind of speech is equally likely."""
    if request.kind != "speak":
        return generator.choice(request.acts)
    kind = generator.choice(("accuse", "defend", "claim"))
    return spoken(generator.choice([act for act in request.acts if act.startswith(kind)]), generator)


def follower(game: Game, request: Request, generator: random.Random) -> str:
    """Accuse and vote for the player who is accused most often on this day."""
    return _against(_most_accused(game, request, generator), request, generator)


def loner(game: Game, request: Request, generator: random.Random) -> str:
    """Accuse and vote for a player whom nobody has accused on this day, if there is one."""
    accused = game.accused()
    quiet = [player for player in game.alive if player != request.player and not accused[player]]
    return _against(generator.choice(quiet), request, generator) if quiet else anybody(game, request, generator)


def hiding_wolf(game: Game, request: Request, generator: random.Random) -> str:
    """Accuse and vote for players who are no wolves, at random; kill at random."""
    wolves = game.those(WOLF)
    innocent = [player for player in game.alive if player not in wolves]
    return _against(generator.choice(innocent), request, generator)


def blaming_wolf(game: Game, request: Request, generator: random.Random) -> str:
    """Accuse and vote for the villager whom the village suspects most, and kill the one whom it suspects least."""
    wolves, level = game.those(WOLF), suspicion(game)
    innocent = [player for player in game.alive if player not in wolves]
    choose = min if request.kind == "kill" else max
    return _against(choose(innocent, key=lambda player: level[player]), request, generator)


VILLAGES: Mapping[str, Script] = MappingProxyType(
    {"rule": villager, "random": anybody, "follower": follower, "loner": loner}
)
WOLVES: Mapping[str, Script] = MappingProxyType({"random": anybody, "hiding": hiding_wolf, "blaming": blaming_wolf})


def spoken(act: str, generator: random.Random) -> str:
    """A speech: the act and some words."""
    return f"{act}. {generator.choice(TALK)}".rstrip()


def _against(target: str, request: Request, generator: random.Random) -> str:
    if request.kind == "speak":
        return spoken(f"accuse {target}", generator)
    return f"{request.kind} {target}"


def _most_accused(game: Game, request: Request, generator: random.Random) -> str:
    accused = game.accused()
    others: Sequence[str] = [player for player in game.alive if player != request.player]
    highest = max(accused[player] for player in others)
    return generator.choice([player for player in others if accused[player] == highest])
