"""Werewolf: observations without hidden roles, games that follow from their seed, the source's rewards, the rule."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipe_projects import modules_of

demonstrations, game, league, players, prepare, sides, werewolf = modules_of(
    "werewolf", "demonstrations", "game", "league", "players", "prepare", "sides", "werewolf"
)
Game, Request, Werewolf = game.Game, game.Request, werewolf.Werewolf
Answered = list[tuple[Request, str]]


def requests(played: Game, answer: Callable[[Request], str]) -> Iterator[tuple[Request, str]]:
    """Play a game; yield each request before its answer counts."""
    play = played.play()
    request = next(play, None)
    while request is not None:
        said = answer(request)
        yield request, said
        try:
            request = play.send(said)
        except StopIteration:
            request = None


def at_random(seed: int, *, seer: bool) -> tuple[Game, Answered]:
    """A game of random acts and illegal answers, and its answers."""
    played, generator = Game(seed, seer), random.Random(seed)

    def answer(request: Request) -> str:
        return "nothing" if generator.random() < 0.05 else players.anybody(played, request, generator)

    return played, list(requests(played, answer))


def observers(played: Game) -> list[list[str]]:
    """The wolves, who share what they know, and each other player."""
    wolves = [player for player in played.players if played.roles[player] == game.WOLF]
    return [wolves, *([player] for player in played.players if player not in wolves)]


def permuted(played: Game, observer: list[str], generator: random.Random) -> dict[str, str]:
    """Roles that agree with all that the observer knows at the end of the game."""
    known = {*observer, *(player for player in played.players if player not in played.alive)}
    for player in observer:
        if played.roles[player] == game.SEER:
            known |= {event.text.split()[0] for event in played.record if event.witnesses == {player}}
    others = [player for player in played.players if player not in known]
    roles = [played.roles[player] for player in others]
    generator.shuffle(roles)
    return {**played.roles, **dict(zip(others, roles, strict=True))}


def replayed(played: Game, answers: Answered, roles: dict[str, str]) -> Game:
    """The game with the same public history and other roles; whoever is a wolf or a seer now acts at night."""
    again = Game(played.seed, played.seer, roles)
    public = {(request.kind, request.player, day): said for request, said, day in _by_day(answers)}
    nightly = {(request.kind, day): said for request, said, day in _by_day(answers) if request.kind in ("kill", "look")}

    def answer(request: Request) -> str:
        if request.kind in ("kill", "look"):
            return nightly[request.kind, again.day]
        return public[request.kind, request.player, again.day]

    list(requests(again, answer))
    return again


def _by_day(answers: Answered) -> list[tuple[Request, str, int]]:
    found, day = [], 0
    for request, said in answers:
        opens = request.kind == "look" or (request.kind == "kill" and (not found or found[-1][0].kind != "look"))
        day += opens
        found.append((request, said, day))
    return found


def compare_observations(seeds: range) -> int:
    """Compare what every player sees of a game with what they see of it under other roles; return the comparisons."""
    count = 0
    for seed in seeds:
        generator = random.Random(f"permuted {seed}")
        played, answers = at_random(seed, seer=seed % 2 == 1)
        for observer in observers(played):
            roles = permuted(played, observer, generator)
            if roles != played.roles:
                again = replayed(played, answers, roles)
                assert again.news(observer) == played.news(observer), (seed, observer, roles)
                assert again.winner == played.winner
                count += 1
    return count


def test_no_observation_depends_on_hidden_roles() -> None:
    assert compare_observations(range(400)) > 300


@pytest.mark.slow
def test_no_observation_of_ten_thousand_games_depends_on_hidden_roles() -> None:
    assert compare_observations(range(10_000)) > 7_500


def test_the_rule_of_the_village_follows_from_public_speeches_alone() -> None:
    for seed in range(200):
        played, answers = at_random(seed, seer=False)
        _, *villagers = observers(played)
        roles = permuted(played, villagers[0], random.Random(seed))
        again = replayed(played, answers, roles)
        assert players.suspicion(again) == players.suspicion(played)


@pytest.mark.parametrize("seer", [False, True])
def test_a_game_follows_from_its_seed_and_its_answers(seer: bool) -> None:
    for seed in range(50):
        played, answers = at_random(seed, seer=seer)
        said = iter([answer for _, answer in answers])
        again = Game(seed, seer)
        list(requests(again, lambda request, said=said: next(said)))
        assert (again.record, again.roles, again.winner) == (played.record, played.roles, played.winner)
    assert game.deal(1, seer) != game.deal(2, seer)


def test_a_game_ends_with_a_winner_and_shows_who_left() -> None:
    winners = set()
    for seed in range(100):
        played, _ = at_random(seed, seer=True)
        wolves = len(played.those(game.WOLF))
        assert wolves == 0 or 2 * wolves >= len(played.alive)
        assert played.winner == (game.WOLF if wolves else game.VILLAGER)
        winners.add(played.winner)
        left = [player for player in played.players if player not in played.alive]
        public = played.news(())
        assert all(
            f"{player} died, a {played.roles[player]}." in public or player in played.voted_out for player in left
        )
        assert all(f"{player} is voted out, a {played.roles[player]}." in public for player in played.voted_out)
    assert winners == {game.WOLF, game.VILLAGER}


@pytest.mark.parametrize(
    ("answer", "act", "words"),
    [
        ("accuse Bo. Too quiet.", "accuse Bo", "Too quiet."),
        ("accuse a. Too quiet.", "accuse Bo", "Too quiet."),
        ("accuse b.Too quiet.", "accuse Cy", "Too quiet."),
        ("accuse Bo", "accuse Bo", ""),
        ("accuse Bo:\n I saw\nit", "accuse Bo", "I saw it"),
        ("accuse Bo. " + "x" * 100, "accuse Bo", "x" * game.WORDS),
        ("claim seer. Bo is a wolf.", "claim seer", "Bo is a wolf."),
        ("accuse c", None, ""),
        ("accuse Ada", None, ""),
        ("I accuse Bo", None, ""),
        ("accuse", None, ""),
        ("", None, ""),
    ],
)
def test_an_answer_is_an_act_and_free_words(answer: str, act: str | None, words: str) -> None:
    request = Request("Ada", "speak", ("Bo", "Cy"), ("accuse Bo", "accuse Cy", "claim seer"))
    assert request.chosen(answer) == act
    if act is not None:
        assert game.free_text(answer) == words
        assert request.chosen(request.by_place(answer)) == act


def played_by(script: Callable[..., str], seed: int, **arguments: object) -> tuple[Werewolf, list[float]]:
    """A game of a scripted pair of wolves in the environment, and the rewards of its acts."""
    environment, generator = Werewolf(**arguments), random.Random(seed)
    turn, rewards = environment.start(seed), []
    while not turn.done:
        turn = environment.act(script(environment.game, environment.request, generator))
        assert turn.valid
        rewards.append(turn.reward)
    return environment, rewards


def test_step_rewards_are_those_of_the_article() -> None:
    for seed in range(100):
        environment, rewards = played_by(players.hiding_wolf, seed)
        found = environment.game
        exposed = sum(found.roles[out] == game.WOLF for out in found.voted_out)
        accused = [said for said in found.speeches if said.kind == "accuse" and found.roles[said.player] == game.WOLF]
        blamed = sum(
            said.target == found.voted_out[said.day - 1] for said in accused if found.roles[said.target] != game.WOLF
        )
        won = found.winner == game.WOLF
        assert sum(rewards) == 10 * won + 5 * (2 - exposed) + 2 * blamed - 5 * exposed
        assert (sum(rewards) >= 1) == won, "the evaluation's pass rate is the share of won games"
        assert all(reward == 0 for reward in rewards[:3]), "a kill and two speeches decide nothing yet"


def test_an_answer_that_is_no_act_is_a_pass() -> None:
    environment = Werewolf()
    turn = environment.start(5)
    turn = environment.act("hello")
    assert not turn.valid and len(environment.game.alive) == 6
    turn = environment.act("accuse nobody at all")
    assert not turn.valid and " is silent." in turn.observation


def test_the_environment_of_the_platform_plays_the_game() -> None:
    async def play() -> tuple[float, dict[str, float]]:
        environment, generator = Werewolf(seer=True), random.Random(1)
        turn, total = await environment.reset({"seed": 1}), 0.0
        while not turn.done:
            turn = await environment.step(players.anybody(environment.game, environment.request, generator))
            total += turn.reward
        await environment.close()
        return total, dict(turn.metrics)

    total, metrics = asyncio.run(play())
    assert metrics["wolves_win"] == (total >= 1) and 0 <= metrics["hidden"] <= 1
    with pytest.raises(ValueError, match="village 'nice': expected one of rule, random"):
        Werewolf("nice")


def win_rate(script: Callable[..., str], seeds: range, **arguments: object) -> float:
    """Share of games that a scripted pair of wolves wins."""
    won = [played_by(script, seed, **arguments)[0].game.winner == game.WOLF for seed in seeds]
    return sum(won) / len(won)


def test_random_wolves_win_half_and_the_rule_can_be_beaten() -> None:
    seeds = range(1_000, 1_600)
    assert win_rate(players.anybody, seeds) == pytest.approx(0.5, abs=0.06)
    assert win_rate(players.blaming_wolf, seeds) > 0.9
    assert win_rate(players.anybody, prepare.HELD_OUT) == pytest.approx(0.5, abs=0.06)


def test_demonstrations_are_legal_and_without_skill() -> None:
    messages = list(demonstrations.conversations(range(400)))
    said = [each["content"] for shown in messages for each in shown if each["role"] == "assistant"]
    kinds = [answer.split()[0] for answer in said if answer.split()[0] in ("accuse", "defend", "claim")]
    assert {answer.split()[0] for answer in said} == {"kill", "look", "accuse", "defend", "claim", "vote"}
    assert kinds.count("accuse") / len(kinds) == pytest.approx(1 / 3, abs=0.05)
    assert all(shown[0]["content"].startswith("Werewolf, game ") for shown in messages if shown)


def test_games_to_explore_to_hold_out_and_to_imitate_differ() -> None:
    seeds = [set(prepare.GAMES), set(prepare.HELD_OUT), set(prepare.DEMONSTRATIONS)]
    assert len(seeds[1]) == 300 and len(set().union(*seeds)) == sum(map(len, seeds))


def test_a_league_of_scripts_rates_the_better_wolves_higher() -> None:
    games = range(100)
    rates = {
        (f"wolves {name}", f"village {other}"): league.match(players.WOLVES[name], players.VILLAGES[other], games)
        for name in ("random", "blaming")
        for other in ("rule", "follower")
    }
    assert rates == {pair: rate for pair, rate in rates.items() if 0 <= rate <= 1}
    rated = league.ratings(rates, len(games))
    assert rated["village rule"] == 1000
    assert rated["wolves blaming"] > rated["wolves random"] + 200
    assert rated["village rule"] > rated["village follower"]


def test_checkpoints_of_one_step_are_different_players(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(league, "Model", lambda folder: folder)
    folders = [Path("a/global_step_9"), Path("b/global_step_9")]
    found = league.entrants(players.WOLVES, folders)
    assert [found[str(folder)] for folder in folders] == folders and len(found) == len(players.WOLVES) + 2
    for given in ([*folders, folders[0]], [Path("random")]):
        with pytest.raises(SystemExit, match=f"two players of a side have the name {given[-1]}"):
            league.entrants(players.WOLVES, given)


@pytest.mark.slow
def test_a_repeated_match_of_a_model_has_the_same_games(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = league.Model(tiny_model), list[list[str]]()
    answers = model.answers

    def noted(conversations: list[list[dict[str, str]]]) -> list[str]:
        said[-1].extend(given := answers(conversations))
        return given

    monkeypatch.setattr(model, "answers", noted)
    for _ in range(2):
        said.append([])
        league.match(model, players.VILLAGES["rule"], range(2))
    assert said[0] and said[0] == said[1]


def test_ratings_are_those_of_the_formula() -> None:
    level = {"wolves a": 1100.0, "wolves b": 800.0, "village rule": 1000.0, "village x": 900.0}
    rates = {
        (wolves, village): 1 / (1 + 10 ** ((level[village] - level[wolves]) / 400))
        for wolves in ("wolves a", "wolves b")
        for village in ("village rule", "village x")
    }
    assert league.ratings(rates, 1_000_000) == pytest.approx(level, abs=0.1)


@pytest.mark.parametrize(
    ("answer", "act"),
    [("vote b", "vote Cy"), ("vote Cy", "vote Cy"), ("vote ab", None), ("vote abc", None), ("vote d", None)],
)
def test_one_place_or_name_is_a_target(answer: str, act: str | None) -> None:
    targets = ("Bo", "Cy", "Dee")
    assert Request("Ada", "vote", targets, tuple(f"vote {name}" for name in targets)).chosen(answer) == act


class Speaker:
    """A model of the workflow's protocol that answers by a script, and keeps the conversations."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, str]]] = []

    async def chat(self, messages: list[dict[str, str]]) -> dict[str, str]:
        self.conversations.append(list(messages))
        act = messages[-1]["content"].splitlines()[-1].split(" ")[0]
        verb = {"Choose": "kill", "Speak,": "accuse", "Vote,": "vote"}[act]
        return {"role": "assistant", "content": f"{verb} a"}


def test_a_side_that_learns_gets_the_rewards_of_its_side() -> None:
    task: Any = type("Task", (), {"raw": {"seed": 4}, "prompt": "Werewolf, game 4."})
    wolves, village = Speaker(), Speaker()
    as_wolves = asyncio.run(sides.Sides(["policy"], ["rule"]).run(task, wolves))
    as_village = asyncio.run(sides.Sides(["hiding"], ["policy"]).run(task, village))
    for found, sign in ((as_wolves, 1), (as_village, -1)):
        assert found.metrics is not None and found.reward is not None
        assert (sign * found.reward >= 1) == (found.metrics["wolves_win"] == 1)
    assert all("The wolves are" in talk[0]["content"] for talk in wolves.conversations)
    assert not any("The wolves are" in talk[0]["content"] for talk in village.conversations)
    assert {len(talk) for talk in village.conversations} <= {1, 3, 5, 7}
    with pytest.raises(ValueError, match=r"expected \[policy\] as one of them"):
        sides.Sides(["policy"], ["policy"])
