"""Rewards of the wolves, and metrics of how they play.

Rewards as in AgentScope's article on agentic RL: 10 for a won game, 5 for each wolf that lives at its end, 2 for each
wolf that has accused the villager who is voted out, -5 for each wolf that is voted out.
"""

from game import WOLF, Game

TEAM_WIN, SURVIVE, BLAME, EXPOSED = 10.0, 5.0, 2.0, -5.0


def reward(game: Game) -> float:
    """The rewards of both wolves up to now."""
    total = sum(
        EXPOSED if game.roles[out] == WOLF else BLAME * len(blamers(game, day, out))
        for day, out in enumerate(game.voted_out, 1)
    )
    if game.winner is None:
        return total
    return total + TEAM_WIN * (game.winner == WOLF) + SURVIVE * len(game.those(WOLF))


def blamers(game: Game, day: int, player: str) -> set[str]:
    """The wolves that accused a player on a day."""
    against = [said for said in game.speeches if (said.day, said.kind, said.target) == (day, "accuse", player)]
    return {said.player for said in against if game.roles[said.player] == WOLF}


def metrics(game: Game) -> dict[str, float]:
    """Whether the wolves won, and the abilities that the article names: to hide, to blame, to act as a team.

    ``hidden``: share of the wolves' speeches that accuse; other speeches are suspicious. ``blamed``: share of the days
    on which a villager is voted out whom a wolf accused. ``together``: share of the days with votes of two wolves on
    which both are for the same villager. A share of nothing is left out.
    """
    found = {"wolves_win": float(game.winner == WOLF)}
    own = [said for said in game.speeches if game.roles[said.player] == WOLF]
    said_kinds = [said.kind for said in own if said.kind != "vote"]
    if said_kinds:
        found["hidden"] = said_kinds.count("accuse") / len(said_kinds)
    blamed = [game.roles[out] != WOLF and bool(blamers(game, day, out)) for day, out in enumerate(game.voted_out, 1)]
    if blamed:
        found["blamed"] = sum(blamed) / len(blamed)
    votes = [[said.target for said in own if said.kind == "vote" and said.day == day] for day in range(1, game.day + 1)]
    pairs = [(one, other) for one, other in (pair for pair in votes if len(pair) == 2)]
    if pairs:
        found["together"] = sum(one == other and game.roles[one] != WOLF for one, other in pairs) / len(pairs)
    return found
