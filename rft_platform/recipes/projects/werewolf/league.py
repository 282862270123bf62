"""A league of checkpoints and scripts: win rates of all pairs, Elo ratings, and what scripts exploit.

``python league.py --wolves FOLDER ... --village FOLDER ...`` lets every pair of wolves meet every village in the same
games. The folders are checkpoints (``global_step_N``), named by the paths as given; the scripts of ``players.py``
always take part. The table is printed and written to ``league.json``.
"""

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demonstrations import QUESTION
from game import VILLAGER, WOLF, Game, Request
from players import VILLAGES, WOLVES, Script
from werewolf import Conversation

HERE = Path(__file__).parent
ANCHOR = "rule"  # the village that has the rating 1000


class Model:
    """The model of a checkpoint, which answers conversations by sampling at temperature 1."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, use_safetensors=True
        )

    def answers(self, conversations: Sequence[list[dict[str, str]]]) -> list[str]:
        """One answer for each conversation."""
        inputs = self._tokenizer.apply_chat_template(
            list(conversations), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(**inputs, max_new_tokens=16, do_sample=True, top_k=0)
        answers: list[str] = self._tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers


class Table:
    """A game, the conversations of its players, and the request that waits for an answer."""

    def __init__(self, seed: int) -> None:
        self.game, self.lots = Game(seed), random.Random(f"league {seed}")
        pack = Conversation(self.game, *self.game.those(WOLF))
        self._seen = {
            name: pack if name in pack.players else Conversation(self.game, name) for name in self.game.players
        }
        self._said: dict[Conversation, list[dict[str, str]]] = {seen: [] for seen in self._seen.values()}
        self._play = self.game.play()
        self.request: Request | None = next(self._play)

    @property
    def side(self) -> str:
        """Whose answer is awaited; empty after the end."""
        if self.request is None:
            return ""
        return WOLF if self.game.roles[self.request.player] == WOLF else VILLAGER

    def conversation(self) -> list[dict[str, str]]:
        """The conversation that an answer to the request continues."""
        assert self.request is not None
        seen = self._seen[self.request.player]
        said = self._said[seen]
        opening = "" if said else f"{QUESTION.format(self.game.seed)}\n\n"
        said.append({"role": "user", "content": opening + seen.observation(self.request)})
        return said

    def answer(self, text: str, *, by_model: bool) -> None:
        """Give the answer to the request."""
        assert self.request is not None
        if by_model:
            self._said[self._seen[self.request.player]].append({"role": "assistant", "content": text})
        try:
            self.request = self._play.send(text)
        except StopIteration:
            self.request = None


def match(wolves: Model | Script, village: Model | Script, seeds: Sequence[int]) -> float:
    """The share of the games that the wolves win. A repeated match has the same games."""
    tables = [Table(seed) for seed in seeds]
    sides: Mapping[str, Model | Script] = {WOLF: wolves, VILLAGER: village}
    if any(isinstance(actor, Model) for actor in sides.values()):
        import torch

        torch.manual_seed(0)
    while waiting := [table for table in tables if table.request is not None]:
        for side, actor in sides.items():
            asked = [table for table in waiting if table.side == side]
            if not isinstance(actor, Model):
                for table in asked:
                    assert table.request is not None
                    table.answer(actor(table.game, table.request, table.lots), by_model=False)
            elif asked:
                for table, text in zip(asked, actor.answers([each.conversation() for each in asked]), strict=True):
                    table.answer(text, by_model=True)
    return sum(table.game.winner == WOLF for table in tables) / len(tables)


def ratings(rates: Mapping[tuple[str, str], float], games: int) -> dict[str, float]:
    """Elo ratings by maximum likelihood: ``P(wolves win) = 1 / (1 + 10^((village - wolves) / 400))``.

    One more won and one more lost game for each pair keep the ratings finite.
    """
    level = dict.fromkeys((name for pair in rates for name in pair), 0.0)
    for _ in range(4_000):
        slope = dict.fromkeys(level, 0.0)
        for (wolves, village), rate in rates.items():
            share = (rate * games + 1) / (games + 2)
            surprise = share - 1 / (1 + math.exp(level[village] - level[wolves]))
            slope[wolves] += surprise
            slope[village] -= surprise
        level = {name: level[name] + 0.3 * slope[name] for name in level}
    anchor = level[f"village {ANCHOR}"]
    return {name: 1000 + 400 / math.log(10) * (level[name] - anchor) for name in level}


def entrants(scripts: Mapping[str, Script], folders: Sequence[Path]) -> dict[str, Model | Script]:
    """The scripts and the checkpoints by name. Ends the program if two have the same name."""
    names = [*scripts, *map(str, folders)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"two players of a side have the name {', '.join(twice)}: give each folder once, by its path")
    return {**scripts, **{str(folder): Model(folder) for folder in folders}}


def main() -> None:
    """Play all matches and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wolves", type=Path, nargs="*", default=[], help="checkpoints that play the wolves")
    parser.add_argument("--village", type=Path, nargs="*", default=[], help="checkpoints that play the village")
    parser.add_argument("--games", type=int, default=100)
    given = parser.parse_args()
    wolves, villages = entrants(WOLVES, given.wolves), entrants(VILLAGES, given.village)
    rates = {}
    for name, pack in wolves.items():
        for other, village in villages.items():
            rates[f"wolves {name}", f"village {other}"] = match(pack, village, range(given.games))
        row = [f"{rates[f'wolves {name}', f'village {other}']:.0%} against {other}" for other in villages]
        print(f"wolves {name}: {', '.join(row)}", flush=True)
    rated = ratings(rates, given.games)
    for name, rating in sorted(rated.items(), key=lambda each: -each[1]):
        print(f"{rating:6.0f}  {name}")
    table = [{"wolves": pair[0], "village": pair[1], "wolves_win": rate} for pair, rate in rates.items()]
    (HERE / "league.json").write_text(
        json.dumps({"games": given.games, "matches": table, "elo": rated}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
