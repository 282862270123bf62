"""State of one request in the engine: its prompts and settings, and its results so far.

A row is one sequence to sample: one choice of one prompt.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rft_platform.inference.interface import Completion, Generation, PartialBatch, SamplingParams
from rft_platform.openai_api.answers import TopLogprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a streamed request."""

    row: int
    token_id: int
    logprob: float
    top: TopLogprobs
    finish_reason: str | None  # set on the row's last token


@dataclass(eq=False)
class Request:
    """Prompts that are sampled on one version of the weights; ``future`` gets the generations or the error.

    Rows are numbered prompt by prompt, ``sampling.n`` choices each.
    """

    prompts: list[list[int]]
    sampling: SamplingParams
    max_len: int  # tokens of prompt and completion together
    top_logprobs: int = 0  # alternatives to report at each position
    on_token: Callable[[TokenEvent], None] | None = None  # called in the engine's thread
    partial: PartialBatch | None = None
    future: "Future[list[Generation]]" = field(default_factory=Future)
    policy_version: int | None = None  # set when the generator admits the first row
    admitted: int = 0  # rows given to the generator so far
    abandoned: bool = False  # the caller has disconnected; set from any thread
    results: dict[int, Completion] = field(default_factory=dict)  # by row
    tops: dict[int, list[TopLogprobs]] = field(default_factory=dict)  # by row
    _open: Counter[int] = field(default_factory=Counter)  # rows of each group that have not ended

    def __post_init__(self) -> None:
        if self.partial is not None:
            self._open = Counter(group for group in self.partial.groups for _ in range(self.sampling.n))

    @property
    def rows(self) -> int:
        """Number of sequences to sample."""
        return len(self.prompts) * self.sampling.n

    @property
    def admissible(self) -> int:
        """Number of rows that may have been given to the generator by now."""
        return self.rows if self.partial is None else min(self.rows, len(self.results) + self.partial.at_once)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens of the finished rows."""
        return sum(len(done.token_ids) for done in self.results.values())

    @property
    def started(self) -> bool:
        """Whether the generator has admitted a row: the request then finishes on the current weights."""
        return self.admitted > 0

    @property
    def ends_early(self) -> bool:
        """Whether the caller wants no further tokens, because all rows of enough groups have ended."""
        return self.partial is not None and sum(not left for left in self._open.values()) >= self.partial.enough

    @property
    def over(self) -> bool:
        """Whether no further row of this request will be started."""
        return self.abandoned or self.future.done()

    def limit_of(self, prompt: int) -> int:
        """Maximum number of tokens to sample after prompt number ``prompt``."""
        before = 0 if self.partial is None else self.partial.sampled[prompt]
        return min(self.sampling.max_tokens - before, self.max_len - len(self.prompts[prompt]))

    def length_of(self, row: int) -> int:
        """Maximum final length of row ``row``, in tokens."""
        prompt = row // self.sampling.n
        return len(self.prompts[prompt]) + self.limit_of(prompt)

    def finish(self, row: int, completion: Completion, tops: list[TopLogprobs]) -> None:
        """Store the result of one row; the last one completes the request."""
        self.results[row], self.tops[row] = completion, tops
        if self.partial is not None and completion.finish_reason != "abort":
            self._open[self.partial.groups[row // self.sampling.n]] -= 1
        if len(self.results) == self.rows and not self.future.done():
            self.future.set_result(self._generations())

    def abort(self) -> None:
        """Finish every row without a result as aborted, without tokens."""
        if self.future.done():
            return
        for row in range(self.rows):
            if row not in self.results:
                self.finish(row, Completion([], [], "abort"), [])

    def fail(self, error: BaseException) -> None:
        """Fail the request with ``error``."""
        if not self.future.done():
            self.future.set_exception(error)

    def _generations(self) -> list[Generation]:
        n, version = self.sampling.n, self.policy_version or 0
        return [
            Generation(prompt, [self.results[row] for row in range(index * n, (index + 1) * n)], version)
            for index, prompt in enumerate(self.prompts)
        ]
