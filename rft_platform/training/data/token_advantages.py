"""Compute token advantages of a training's rows before its first step: from rows to trajectories and back to rows.

The rows of a run, sorted by step, are one trajectory of trained tokens. All rows of a task are on one rank and in one
step, so no run is split.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rft_platform.algorithms.kl import KlControl, kl_estimator
from rft_platform.algorithms.spec import AlgorithmSpec, KlPenaltySpec
from rft_platform.algorithms.token_advantages.registry import (
    Trajectories,
    check_token_advantage,
    compute_token_advantages,
)
from rft_platform.common.errors import NonFiniteError, UserError, some
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce


@dataclass(slots=True)
class AdvantageReport:
    """Metrics of the token advantages, and the state of the KL coefficient for the next training."""

    metrics: dict[str, float]
    kl_control: KlControl | None


def set_token_advantages(
    rows: TrainingRows, mine: np.ndarray, algorithm: AlgorithmSpec, control: KlControl | None, reduce: Reduce
) -> AdvantageReport:
    """Set ``advantage`` (with a critic also ``returns``) per token on the rows ``mine``, which this rank trains.

    Every rank must call it. ``control`` is the state of an adaptive KL penalty. Raises UserError if the rows are not
    rollouts or the algorithm's parts do not fit, and NonFiniteError for rewards that are not finite.
    """
    name = algorithm.token_advantage
    assert name is not None
    layout = _Layout.of(rows, mine)
    tokens = _trajectories(rows, layout, algorithm, reduce)
    metrics: dict[str, float] = {}
    penalty = algorithm.kl_penalty
    if penalty is not None:
        control = _start(control, penalty)
        kl = _divergence(layout, algorithm, penalty)
        tokens.reward[:] -= control.coef * kl
        count, total = _sum(reduce, np.array([np.sum(tokens.share), kl @ tokens.share])).tolist()
        metrics |= {"kl_penalty": total / max(count, 1.0), "kl_coef": control.coef}
        if penalty.target is not None:
            control = control.adapted(metrics["kl_penalty"], count, penalty.target, penalty.horizon)
    out = compute_token_advantages(name, algorithm.token_advantage_args, tokens, lambda values: _sum(reduce, values))
    layout.spread("advantage", out.advantage)
    if out.returns is not None:
        layout.spread("returns", out.returns)
    elif algorithm.critic is not None:
        raise UserError(f"token advantage {name!r} requires a critic, but computes no returns to train it with")
    return AdvantageReport(metrics, control if penalty is not None else None)


def check_token_parts(algorithm: AlgorithmSpec) -> None:
    """Raise UserError if token advantage, critic and KL penalty are unknown or do not fit each other."""
    name, penalty = algorithm.token_advantage, algorithm.kl_penalty
    if penalty is not None:
        kl_estimator(penalty.estimator)
        if name is None:
            raise UserError("a KL penalty in the reward needs a token advantage: set one, gae or reinforce_plus_plus")
    entry = None if name is None else check_token_advantage(name, algorithm.token_advantage_args)
    if penalty is not None and entry is not None and not entry.rewards:
        raise UserError(
            f"the KL penalty changes the reward, which token advantage {name!r} does not read: remove the penalty, "
            "or use the KL in the loss (beta)"
        )
    uses_critic = entry is not None and entry.critic
    if uses_critic and algorithm.critic is None:
        raise UserError(f"token advantage {name!r} needs a critic: set the critic's settings")
    if algorithm.critic is not None and not uses_critic:
        raise UserError(f"token advantage {name!r} uses no critic: remove the critic's settings, or use 'gae'")


@dataclass(slots=True)
class _Layout:
    """Rows sorted by run and step, and the positions of their trained tokens.

    Masked rows have no sample and no trained token. They stand in the facts of runs and rewards, because their run's
    reward counts in its group.
    """

    samples: list[Sample]  # of the rows that are not masked
    mine: np.ndarray  # int64 [S], indices of the samples' rows
    facts: dict[str, np.ndarray]  # [n] each: group, run, step, reward, and step_reward if any row has one
    sampled: np.ndarray  # bool [n]: the row is not masked
    first_row: np.ndarray  # int64 [R + 1], run r has the rows first_row[r]:first_row[r + 1]
    first_token: np.ndarray  # int64 [n + 1], first token of each row

    @classmethod
    def of(cls, rows: TrainingRows, mine: np.ndarray) -> "_Layout":
        """The layout of the rows with indices ``mine``. Raises UserError for rows without runs or rewards."""
        if not {"run", "step", "reward"} <= rows.facts.keys():
            raise UserError("token advantages need rollouts: these rows have no runs and no rewards")
        _check_steps(rows)
        beside = np.isin(rows.masked["group"], rows.group[mine])
        own = {name: values[mine] for name, values in {**rows.facts, "group": rows.group}.items()}
        facts = {
            name: np.concatenate([own[name], values[beside]]) for name, values in rows.masked.items() if name in own
        }
        order = np.lexsort((facts["step"], facts["run"], facts["group"]))
        facts = {name: values[order] for name, values in facts.items()}
        sampled = order < len(mine)
        mine = mine[order[sampled]]
        new = (np.diff(facts["run"]) != 0) | (np.diff(facts["group"]) != 0)
        starts = np.append(0, np.flatnonzero(new) + 1) if len(order) else np.zeros(0, np.int64)
        samples = [rows.samples[row] for row in mine]
        counts = np.zeros(len(order), np.int64)
        counts[sampled] = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
        first_token = np.append(0, np.cumsum(counts))
        return cls(samples, mine, facts, sampled, np.append(starts, len(order)), first_token)

    @property
    def first_token_of_sample(self) -> np.ndarray:
        """int64 [S + 1]: first token of each sample."""
        return np.append(self.first_token[:-1][self.sampled], self.first_token[-1])

    def column(self, name: str) -> np.ndarray:
        """A per-token field of the samples, float64 [N]. Raises UserError if a row lacks the field."""
        missing = [sample.row_id for sample in self.samples if getattr(sample, name) is None]
        if missing:
            raise UserError(
                f"{len(missing)} rows have no {name} ({some(missing)}): the token advantage or the KL "
                "penalty needs them; train on rollouts, and configure the models that it requires"
            )
        parts = [getattr(sample, name)[sample.loss_mask] for sample in self.samples]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float64)

    def spread(self, name: str, values: np.ndarray) -> None:
        """Set field ``name`` of every sample to its part of ``values`` [N], float32; 0 on other tokens."""
        for sample, (first, end) in zip(self.samples, pairwise(self.first_token_of_sample.tolist()), strict=True):
            column = np.zeros(len(sample.token_ids), np.float32)
            column[sample.loss_mask] = values[first:end]
            setattr(sample, name, column)


def _trajectories(rows: TrainingRows, layout: _Layout, algorithm: AlgorithmSpec, reduce: Reduce) -> Trajectories:
    name = algorithm.token_advantage
    assert name is not None
    entry = check_token_advantage(name, algorithm.token_advantage_args)
    last = layout.first_row[1:] - 1
    outcome = layout.facts["reward"][last].astype(np.float64) if entry.rewards else np.zeros(len(last))
    _check_rewards(outcome, layout)
    start = layout.first_token[layout.first_row]
    reward = _rewards(layout, start, outcome, layout.facts.get("step_reward") if entry.rewards else None)
    ranks_per_row = _ranks_per_row(len(rows.samples), layout.mine, reduce)
    return Trajectories(
        start=start,
        group=np.unique(layout.facts["group"][last], return_inverse=True)[1],
        outcome=outcome,
        reward=reward,
        logp=layout.column(_own_logprobs(algorithm)),
        teacher_logp=layout.column("teacher_logprobs") if entry.teacher else None,
        value=layout.column("old_values") if entry.critic else None,
        share=np.repeat(1.0 / ranks_per_row[layout.mine], np.diff(layout.first_token_of_sample)),
    )


def _rewards(layout: _Layout, start: np.ndarray, outcome: np.ndarray, step_reward: np.ndarray | None) -> np.ndarray:
    """Rewards of the tokens, float64 [N].

    The last token of a step has the step's reward. The last token of a run also has the rest of the outcome.
    ``step_reward`` has one value per row of the layout; NaN: the step has none. The reward of a step without trained
    tokens (a masked step) is at the last trained token before the step, because the tokens after it did not earn it;
    if there is none before it, this reward is left out.
    """
    reward, rest = np.zeros(layout.first_token[-1]), outcome
    if step_reward is not None:
        given, run = np.nan_to_num(step_reward), np.repeat(np.arange(len(outcome)), np.diff(layout.first_row))
        rest = outcome - np.bincount(run, given, minlength=len(outcome))
        end = layout.first_token[1:]
        earned = end > start[run]
        np.add.at(reward, end[earned] - 1, given[earned])
    acts = np.diff(start) > 0
    reward[start[1:][acts] - 1] += rest[acts]
    return reward


def _own_logprobs(algorithm: AlgorithmSpec) -> str:
    """The field with the log-probs in the denominator of the importance ratio."""
    return "old_logprobs" if algorithm.correction == "decoupled" else "rollout_logprobs"


def _ranks_per_row(count: int, mine: np.ndarray, reduce: Reduce) -> np.ndarray:
    """How many ranks train each row, float64 [count]; with several epochs, more than one rank may."""
    count_of_row = np.zeros(count)
    count_of_row[mine] = 1.0
    return _sum(reduce, count_of_row)


def _sum(reduce: Reduce, values: np.ndarray) -> np.ndarray:
    total: np.ndarray = reduce(torch.from_numpy(values.copy()), "sum").numpy()
    return total


def _check_steps(rows: TrainingRows) -> None:
    """Raise UserError if a run has a step twice. All ranks check all rows, so all ranks raise the error."""
    run = rows.facts["run"]
    key = np.stack([rows.group[: len(run)], run, rows.facts["step"]])
    first = np.unique(key, axis=1, return_index=True)[1]
    again = np.setdiff1d(np.arange(key.shape[1]), first)
    if len(again):
        named = some([rows.samples[row].row_id for row in again])
        raise UserError(
            f"{len(again)} rows belong to a step of a run that already has a row ({named}): the choices of one call "
            "(n > 1) are alternatives, but a token advantage needs one row per step; let the workflow request "
            "one choice per call, or set an algorithm.advantage_fn that is computed from rewards (grpo, step_wise_grpo)"
        )


def _check_rewards(outcome: np.ndarray, layout: _Layout) -> None:
    bad = np.flatnonzero(~np.isfinite(outcome))
    if len(bad):
        of_bad = np.isin(np.repeat(np.arange(len(outcome)), np.diff(layout.first_row)), bad)
        named = some(
            [sample.row_id for sample, is_bad in zip(layout.samples, of_bad[layout.sampled], strict=True) if is_bad]
        )
        raise NonFiniteError(f"{len(bad)} runs have a reward that is not finite, in rows {named}: check the judge")


def _start(control: KlControl | None, penalty: KlPenaltySpec) -> KlControl:
    """The state of the previous training's coefficient, unless the request sets another initial coefficient."""
    adaptive = penalty.target is not None and control is not None and control.initial == penalty.coef
    return control if adaptive and control is not None else KlControl.start(penalty.coef)


def _divergence(layout: _Layout, algorithm: AlgorithmSpec, penalty: KlPenaltySpec) -> np.ndarray:
    """The penalty's estimate of the KL to the reference at every token, float64 [N]."""
    logp, reference = (
        torch.from_numpy(layout.column(name)) for name in (_own_logprobs(algorithm), "reference_logprobs")
    )
    kl: np.ndarray = kl_estimator(penalty.estimator)(logp, reference).numpy()
    return kl
