"""Decide by a seed, in advance, which process is killed when and how, so that a campaign can be replayed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rft_platform.common.errors import UserError

Mode = Literal["driver", "daemon", "ray"]
#: Moments at which a kill can happen; ``any`` is only a random delay.
Point = Literal[
    "any", "starting", "rollouts", "rows", "judging", "training", "checkpoint", "published", "evaluation", "between"
]
#: ``stop`` stops the process (SIGSTOP): the platform must detect it. ``fault`` is a failing file system call.
How = Literal["kill", "term", "stop+kill", "stop", "fault"]

#: Roles that can be killed in each mode.
TARGETS: dict[Mode, tuple[str, ...]] = {
    "driver": ("driver", "engine", "trainer"),
    "daemon": ("daemon", "webserver", "code_server", "run_worker", "mlflow", "engine", "trainer"),
    "ray": (
        "driver",
        "engine",
        "engine_actor",
        "trainer",
        "trainer_actor",
        "worker",
        "worker_actor",
        "raylet_rollouts",
        "raylet_training",
        "s3_errors",
        "s3_slow",
        "s3_truncated",
        "postgres",
    ),
}
_POINTS: tuple[Point, ...] = (
    "any", "rollouts", "rows", "judging", "training", "checkpoint", "published", "evaluation", "between",
)  # fmt: skip
#: Maximum random delay after a moment, in seconds: about as long as the moment lasts.
_SPREAD_S: dict[Point, float] = {
    "any": 2.0, "starting": 3.0, "rollouts": 0.15, "rows": 0.002, "judging": 0.05, "training": 0.3, "checkpoint": 0.08,
    "published": 0.1, "evaluation": 0.6, "between": 0.3,
}  # fmt: skip
#: Moments of targets on Ray that live in some phases only, and how much longer than here a phase lasts there.
_RAY_POINTS: dict[str, tuple[Point, ...]] = {
    "worker": ("rollouts",), "worker_actor": ("rollouts",), "raylet_rollouts": ("rollouts",),
    "raylet_training": ("training",), "trainer_actor": ("any", "training", "checkpoint"),
    "engine_actor": ("any", "rollouts", "evaluation"),
}  # fmt: skip
_RAY_SLOWER = 10.0
_ANY_SIGNAL = ("driver", "engine", "trainer")  # on Ray; the other processes there are killed
_BROKEN = ("s3_errors", "s3_slow", "s3_truncated", "postgres")
_HOW: tuple[tuple[How, float], ...] = (("kill", 0.7), ("stop", 0.1), ("term", 0.1), ("stop+kill", 0.1))
_HURRY = 0.25  # share of the kills that do not wait for the recovery from the previous one
_AGAIN = 0.3  # share of kills of engine and trainer that are followed by a kill during their restart


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned kill: ``target`` is killed ``delay_s`` after the moment ``point`` is reached."""

    number: int  # from 1, over all projects of a mode
    target: str
    point: Point
    delay_s: float
    how: How
    hurry: bool  # do not wait for the recovery from the previous kill


def check_targets(targets: Sequence[str]) -> list[str]:
    """The targets without duplicates; UserError for an unknown target or an empty list."""
    known = sorted({target for mode in TARGETS.values() for target in mode})
    unknown = [target for target in targets if target not in known]
    if unknown or not targets:
        raise UserError(f"targets {', '.join(unknown) or '(none)'}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(targets))


def schedule(seed: int, kills: int, targets: Sequence[str], first: int = 1, mode: Mode = "driver") -> list[Kill]:
    """The kills of one project, numbered from ``first``. Equal arguments give equal kills; fewer kills give a prefix.

    Every target is used once before any target is used again.
    """
    generator = random.Random(f"{seed}/{first}/{','.join(targets)}")
    planned: list[Kill] = []
    turns: list[str] = []
    while len(planned) < kills:
        if not turns:
            turns = generator.sample(list(targets), len(targets))
        target = turns.pop()
        points = _RAY_POINTS.get(target, _POINTS) if mode == "ray" else _POINTS
        planned.append(_plan(generator, first + len(planned), target, generator.choice(points)))
        if target in ("engine", "trainer") and len(planned) < kills and generator.random() < _AGAIN:
            partners = [target, *({"driver", "run_worker"} & set(targets))]
            again = _plan(generator, first + len(planned), generator.choice(partners), "starting")
            planned.append(again)
    return [_on_ray(kill) for kill in planned] if mode == "ray" else planned


def _on_ray(kill: Kill) -> Kill:
    """The kill at a moment of a slower project, and by what its target knows."""
    how: How = "fault" if kill.target in _BROKEN else kill.how if kill.target in _ANY_SIGNAL else "kill"
    return replace(kill, how=how, delay_s=round(kill.delay_s * (1 if kill.point == "any" else _RAY_SLOWER), 4))


def targets_of(mode: Mode, targets: Sequence[str]) -> list[str]:
    """The targets that exist in a mode, in the mode's order."""
    return [name for name in TARGETS[mode] if name in targets]


def shares(kills: int, targets: Sequence[str]) -> dict[Mode, int]:
    """Number of kills for each mode: three quarters for the faster driver mode if both modes have targets."""
    only_daemon = set(targets) - set(TARGETS["driver"])
    if not only_daemon:
        return {"driver": kills, "daemon": 0}
    if "driver" not in targets:
        return {"driver": 0, "daemon": kills}
    daemon = max(min(kills, len(only_daemon)), kills // 4)
    return {"driver": kills - daemon, "daemon": daemon}


def _plan(generator: random.Random, number: int, target: str, point: Point) -> Kill:
    how = generator.choices([name for name, _ in _HOW], [weight for _, weight in _HOW])[0]
    hurry = point == "starting" or generator.random() < _HURRY
    return Kill(number, target, point, round(generator.uniform(0.0, _SPREAD_S[point]), 4), how, hurry)
