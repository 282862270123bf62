"""Registry of token advantages: their inputs and outputs, and the entry point, which also whitens the advantages.

A token advantage never whitens itself: the entry point does so if the algorithm asks for it. ``whiten`` works over the
valid tokens of all ranks; ``discounted`` sums backwards over runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.common.errors import UserError

EPS = 1e-8
_ROUNDING = 1e-9  # a standard deviation below this share of the mean is rounding noise and counts as 0

Sum = Callable[[np.ndarray], np.ndarray]
"""Sum of a float64 vector over all ranks; every rank gets the result."""


def whiten(values: np.ndarray, share: np.ndarray, total: Sum | None = None) -> np.ndarray:
    """``(x - mean) / sqrt(var + 1e-8)`` with the sample (n - 1) variance; exactly 0 if all x are equal.

    ``share`` [N] is the weight of each token on this rank: 1 / number of ranks that have the token.
    """
    total = total or _one_rank
    count, summed = total(np.array([share.sum(), values @ share]))
    mean = summed / max(count, 1.0)
    centred = values - mean
    (squares,) = total(np.array([np.square(centred) @ share]))
    variance = squares / max(count - 1.0, 1.0)
    if variance <= (_ROUNDING * mean) ** 2:
        return np.zeros_like(values)
    return centred / np.sqrt(variance + EPS)


def _one_rank(values: np.ndarray) -> np.ndarray:
    return values


def discounted(values: np.ndarray, start: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """``y_t = x_t + decay_t * y_{t+1}`` within each run, float64 [N]; run r has the tokens ``start[r]:start[r + 1]``.

    The loop goes through positions, counted from the end of each run, and handles all runs at once. Runs are sorted by
    decreasing length, so the runs that have a token at a position come first.
    """
    out = np.array(values, np.float64)
    decay = np.broadcast_to(decay, out.shape)
    length = np.diff(start)
    order = np.argsort(-length, kind="stable")
    last, length = start[1:][order] - 1, length[order]
    reaching = np.searchsorted(-length, -np.arange(length[0] if len(length) else 0), side="left")  # runs longer than t
    for back, runs in enumerate(reaching.tolist()[1:], start=1):
        at = last[:runs] - back
        out[at] += decay[at] * out[at + 1]
    return out


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The trainable tokens (N) of some runs (R), concatenated by run; the rows of a run are in the order of its steps.

    Tokens that the policy did not sample (a tool's answer, the next question) are left out, because they are not
    actions: the last trainable token before them is directly followed by the first trainable token after them.
    """

    start: np.ndarray  # int64 [R + 1]: run r has the tokens start[r]:start[r + 1], possibly none
    group: np.ndarray  # int64 [R], task of each run; all runs of a task are included
    outcome: np.ndarray  # float64 [R], reward of each run's last step
    #: float64 [N]: each step reward at the last token of its step, the rest of the outcome at the run's last token, and
    #: 0 at other tokens; the KL penalty, if there is one, is subtracted from every token
    reward: np.ndarray
    logp: np.ndarray  # float64 [N], log-probs in the denominator of the loss's ratio
    teacher_logp: np.ndarray | None = None  # float64 [N], if the function needs a teacher
    value: np.ndarray | None = None  # float64 [N]: value of the state before each token, if the function needs a critic
    share: np.ndarray = field(default_factory=lambda: np.ones(1))  # float64 [N] or [1]: 1 / ranks with the token

    @property
    def run(self) -> np.ndarray:
        """Run of each token, int64 [N]."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """``advantage`` [N] per token of the trajectories, and the training targets of the critic (``returns`` [N])."""

    advantage: np.ndarray
    returns: np.ndarray | None = None


TokenAdvantageFunction = Callable[..., TokenAdvantages]
"""``(Trajectories, *, options) -> TokenAdvantages``."""


@dataclass(frozen=True, slots=True)
class TokenAdvantage:
    """A registered function and what it needs."""

    function: TokenAdvantageFunction
    whiten: bool = False  # whiten its advantages over all tokens of the batch; the option ``whiten`` overrides it
    critic: bool = False
    teacher: bool = False
    rewards: bool = True


TOKEN_ADVANTAGES: Registry[TokenAdvantage] = Registry("token advantage", "rft_platform.algorithms.token_advantages")


def token_advantage(
    name: str, *, whiten: bool = False, critic: bool = False, teacher: bool = False, rewards: bool = True
) -> Callable[[TokenAdvantageFunction], TokenAdvantageFunction]:
    """Register the decorated function under ``name`` (``algorithm.advantage_fn`` of the configuration)."""

    def decorate(function: TokenAdvantageFunction) -> TokenAdvantageFunction:
        TOKEN_ADVANTAGES.add(name, TokenAdvantage(function, whiten, critic, teacher, rewards), function)
        return function

    return decorate


def check_token_advantage(name: str, args: Mapping[str, Any]) -> TokenAdvantage:
    """Return the entry called ``name``. Raises UserError for an unknown name or option."""
    entry = TOKEN_ADVANTAGES.get(name)
    own = {option: value for option, value in args.items() if option != "whiten"}
    check_arguments(f"token advantage {name!r}", entry.function, own)
    if not isinstance(args.get("whiten", True), bool):
        raise UserError(f"option 'whiten' of token advantage {name!r} is {args['whiten']!r}: expected true or false")
    return entry


def compute_token_advantages(
    name: str, args: Mapping[str, Any], tokens: Trajectories, total: Sum | None = None
) -> TokenAdvantages:
    """Compute the advantages of ``tokens`` with the function ``name`` and its options ``args``.

    ``args`` are ``algorithm.advantage_fn_args``. ``total`` sums a float64 vector over all ranks; every rank must call
    this function. Returns are never whitened.
    """
    entry = check_token_advantage(name, args)
    options = dict(args)
    whitened = options.pop("whiten", entry.whiten)
    out = entry.function(tokens, **options)
    if not whitened:
        return out
    return TokenAdvantages(
        whiten(out.advantage, np.broadcast_to(tokens.share, out.advantage.shape), total), out.returns
    )
