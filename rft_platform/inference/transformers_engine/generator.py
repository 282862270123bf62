"""The decode loop (continuous batching): each step samples one token for every active row.

A row is one sequence to sample: one choice of one prompt of a request.

All active rows share one forward pass. A prompt is forwarded once for all its choices. The last rows of the batch move
to the places of finished rows, so finished rows cost no computation and no row waits for the longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import Completion, FinishReason
from rft_platform.inference.transformers_engine.attention import SlotCache
from rft_platform.inference.transformers_engine.model import PolicyModel, PromptBatch
from rft_platform.inference.transformers_engine.request import Request, TokenEvent, TopLogprobs
from rft_platform.inference.transformers_engine.sampling import (
    SamplingRows,
    row_keys,
    sample,
    sampling_logprobs,
    uniforms,
)
from rft_platform.openai_api.parsers import StopWatch

OUTPUT_TOKENS = 64  # a row's initial room for sampled tokens; the room is doubled when it is full
REVIEW_STEPS = 1000  # steps between two checks whether the cache is too large for recent rows


@dataclass(slots=True, eq=False)
class Row:
    """One sequence being decoded: row ``index`` of ``request``."""

    request: Request
    index: int
    stop: StopWatch | None
    tops: list[TopLogprobs] = field(default_factory=list)

    @property
    def watched(self) -> bool:
        """Whether the host must process each token of the row: it has stop strings, top log-probs or a stream."""
        return self.stop is not None or self.request.on_token is not None or self.request.top_logprobs > 0


@dataclass(slots=True)
class RowState:
    """Device tensors of the rows; first dimension: rows."""

    token: torch.Tensor  # last sampled token
    length: torch.Tensor  # tokens in the cache
    produced: torch.Tensor  # number of sampled tokens
    limit: torch.Tensor  # maximum number of sampled tokens
    key: torch.Tensor  # key of the row's random numbers
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    tokens: torch.Tensor  # [rows, room]: all sampled tokens
    logprobs: torch.Tensor  # [rows, room]: their log-probs

    def __getitem__(self, rows: slice) -> "RowState":
        return RowState(*(getattr(self, f.name)[rows] for f in fields(self)))

    def joined(self, other: "RowState") -> "RowState":
        """Concatenate these rows and ``other``'s."""
        room = max(self.tokens.shape[1], other.tokens.shape[1])
        self.widen(room)
        other.widen(room)
        return RowState(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows ``source`` over rows ``target``."""
        for f in fields(self):
            values = getattr(self, f.name)
            values[target] = values[source]

    def widen(self, room: int) -> None:
        """Make room for ``room`` sampled tokens per row."""
        missing = room - self.tokens.shape[1]
        if missing > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, missing))
            self.logprobs = torch.nn.functional.pad(self.logprobs, (0, missing))


class Drawn(NamedTuple):
    """One new token of each row."""

    token: torch.Tensor  # [rows]
    logprob: torch.Tensor  # [rows]
    top_ids: torch.Tensor  # [rows, alternatives]: the likeliest tokens, best first
    top_logprobs: torch.Tensor  # [rows, alternatives]


class Generator:
    """Decodes the active rows on one model. Not thread-safe: the scheduler's thread owns it."""

    def __init__(self, model: PolicyModel, end_ids: Sequence[int], decode: Callable[[list[int]], str]) -> None:
        self.model = model
        self.decode = decode
        self.end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64, device=model.device)
        self.cache = SlotCache()
        self.rows: list[Row] = []
        self.state: RowState | None = None
        self._needed = (0, 0)  # maximum rows and tokens per row since the last review of the cache
        self._steps = 0

    @property
    def longest(self) -> int:
        """Maximum final length, in tokens, over the active rows."""
        if self.state is None:
            return 0
        return int((self.state.length - self.state.produced + self.state.limit).max())

    @torch.inference_mode()
    def admit(self, request: Request, count: int) -> None:
        """Start the next ``count`` rows of ``request``, sample their first tokens; stop if the caller disconnects."""
        rows = range(request.admitted, request.admitted + count)
        request.admitted += count
        n = request.sampling.n
        prompts, places = _distinct(request.prompts[rows[0] // n : rows[-1] // n + 1])
        place_of = {row: places[row // n - rows[0] // n] for row in rows}
        slots, longest = len(self.rows) + count, max(map(len, prompts))
        self._note_need(slots, max(self.longest, *map(request.length_of, rows)))
        for batch in self.model.read_prompts(prompts):
            if request.abandoned:
                return
            self.cache.reserve(slots, longest + 1, len(self.rows), batch.prompt_pass)
            position_in_batch = {place: position for position, place in enumerate(batch.indices)}
            members = [row for row in rows if place_of[row] in position_in_batch]
            source = torch.tensor([position_in_batch[place_of[row]] for row in members], device=self.model.device)
            self._join(request, members, batch, source)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one more token for every row."""
        assert self.state is not None
        self._steps += 1
        if self._steps % REVIEW_STEPS == 0:
            self._review_cache()
        longest = int(self.state.length.max())
        self.cache.reserve(len(self.rows), longest + 1, len(self.rows))
        hidden = self.model.next_hidden(self.state.token, self.state.length, longest, self.cache)
        self.state.length += 1
        self._sample(hidden, first=0)

    def release_memory(self) -> None:
        """Release the cache's memory if no row is active; called after some time without work."""
        if not self.rows:
            self._needed = (0, 0)
            self._review_cache()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """End the rows of the requests that ``chosen`` selects. Their result is the tokens sampled so far."""
        self._finish({slot: "abort" for slot, row in enumerate(self.rows) if chosen(row.request)})

    def fail(self, error: BaseException) -> None:
        """Fail every active request with ``error`` and drop the rows."""
        for row in self.rows:
            row.request.fail(error)
        self.rows, self.state = [], None

    def _note_need(self, rows: int, tokens: int) -> None:
        self._needed = max(self._needed[0], rows), max(self._needed[1], tokens)

    def _review_cache(self) -> None:
        """Shrink the cache if it is much larger than the rows have needed since the last call."""
        self.cache.shrink(*self._needed, in_use=len(self.rows))
        self._needed = len(self.rows), self.longest

    def _join(self, request: Request, members: list[int], batch: PromptBatch, source: torch.Tensor) -> None:
        """Append rows ``members`` of ``request`` to the active rows; they continue prompts ``source`` of ``batch``."""
        first, stops = len(self.rows), request.sampling.stop
        self.rows += [Row(request, row, StopWatch(stops, self.decode) if stops else None) for row in members]
        state = self._new_state(request, members)
        self.state = state if self.state is None else self.state.joined(state)
        self.cache.store(batch.prompt_pass, source, first)
        self._sample(batch.last_hidden[source], first)

    def _new_state(self, request: Request, members: list[int]) -> RowState:
        sampling, device, count = request.sampling, self.model.device, len(members)
        prompt, choice = zip(*(divmod(row, sampling.n) for row in members), strict=True)
        whole = {"dtype": torch.int64, "device": device}
        real = {"dtype": torch.float32, "device": device}
        room = min(sampling.max_tokens, OUTPUT_TOKENS)
        return RowState(
            token=torch.zeros(count, **whole),
            length=torch.tensor([len(request.prompts[p]) for p in prompt], **whole),
            produced=torch.zeros(count, **whole),
            limit=torch.tensor([request.limit_of(p) for p in prompt], **whole),
            key=row_keys(sampling.seed, [sampling.first_prompt + p for p in prompt], choice).to(device),
            temperature=torch.full((count,), sampling.temperature, **real),
            top_p=torch.full((count,), sampling.top_p, **real),
            top_k=torch.full((count,), sampling.top_k, **whole),
            tokens=torch.zeros(count, room, **whole),
            logprobs=torch.zeros(count, room, **real),
        )

    def _sample(self, hidden: torch.Tensor, first: int) -> None:
        """Sample a token for each row from ``first`` on, from its ``hidden`` state; finish the rows that it ends."""
        assert self.state is not None
        room = int(self.state.produced[first:].max()) + 1
        if room > self.state.tokens.shape[1]:
            self.state.widen(2 * room)
        state = self.state[slice(first, None)]
        drawn = self._draw(hidden, state, max(row.request.top_logprobs for row in self.rows[first:]))
        rows = torch.arange(len(hidden), device=hidden.device)
        state.tokens[rows, state.produced] = drawn.token
        state.logprobs[rows, state.produced] = drawn.logprob
        state.token.copy_(drawn.token)
        state.produced.add_(1)
        ended = torch.isin(drawn.token, self.end_ids)
        done = (ended | (state.produced >= state.limit)).nonzero().squeeze(-1)
        reasons: dict[int, FinishReason] = {
            first + row: "stop" if end else "length"
            for row, end in zip(done.tolist(), ended[done].tolist(), strict=True)
        }
        if any(row.watched for row in self.rows[first:]):
            self._watch(drawn, first, reasons)
        self._finish(reasons)

    def _draw(self, hidden: torch.Tensor, state: RowState, top: int) -> Drawn:
        """One token per row with its log-prob and the ``top`` likeliest tokens, in pieces of bounded size."""
        pieces = []
        for start in range(0, len(hidden), self.model.rows_a_piece):
            piece = slice(start, start + self.model.rows_a_piece)
            rows = state[piece]
            settings = SamplingRows(rows.temperature, rows.top_p, rows.top_k)
            logprobs = sampling_logprobs(self.model.logits(hidden[piece]), settings)
            token = sample(logprobs, rows.temperature <= 0, uniforms(rows.key, rows.produced))
            chosen = logprobs.gather(-1, token[:, None]).squeeze(-1)
            values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
            pieces.append(Drawn(token, chosen, ids, values))
        drawn = pieces[0] if len(pieces) == 1 else Drawn(*(torch.cat(column) for column in zip(*pieces, strict=True)))
        if not bool(torch.isfinite(drawn.logprob).all()):
            raise EngineError("the served weights produce log-probs that are not finite")
        return drawn

    def _watch(self, drawn: Drawn, first: int, reasons: dict[int, FinishReason]) -> None:
        """Process the new token of each row with stop strings, top log-probs or a stream.

        Looks for a stop string (sets ``reasons[slot]``), stores the alternatives, and sends the token to the stream.
        """
        columns = (column.tolist() for column in drawn)
        for slot, (token, logprob, ids, values) in enumerate(zip(*columns, strict=True), start=first):
            row = self.rows[slot]
            if not row.watched:
                continue
            if row.stop is not None and row.stop.hit(token):
                reasons[slot] = "stop"
            top = list(zip(ids, values, strict=True))[: row.request.top_logprobs]
            row.tops.append(top)
            if row.request.on_token is not None:
                row.request.on_token(TokenEvent(row.index, token, logprob, top, reasons.get(slot)))

    def _finish(self, reasons: dict[int, FinishReason]) -> None:
        """Deliver the results of the rows in ``reasons`` (slot -> reason) and fill their slots with the last rows."""
        if not reasons or self.state is None:
            return
        slots = torch.tensor(list(reasons), device=self.model.device)
        counts = self.state.produced[slots].tolist()
        tokens, logprobs = self.state.tokens[slots].tolist(), self.state.logprobs[slots].tolist()
        for (slot, reason), count, ids, values in zip(reasons.items(), counts, tokens, logprobs, strict=True):
            row = self.rows[slot]
            row.request.finish(row.index, Completion(ids[:count], values[:count], reason), row.tops)
        self._close_gaps(reasons)

    def _close_gaps(self, finished: dict[int, FinishReason]) -> None:
        """Move the last rows into the slots of the ``finished`` rows, so that the remaining rows are contiguous."""
        assert self.state is not None
        remaining = len(self.rows) - len(finished)
        holes = [slot for slot in finished if slot < remaining]
        movers = [slot for slot in range(remaining, len(self.rows)) if slot not in finished]
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        if holes:
            source, target = (torch.tensor(slots, device=self.model.device) for slots in (movers, holes))
            self.cache.move(source, target)
            self.state.move(source, target)
        self.rows = self.rows[:remaining]
        self.state = self.state[slice(0, remaining)] if remaining else None


def _distinct(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The distinct prompts, and for each given prompt its index among them."""
    place: dict[tuple[int, ...], int] = {}
    places = [place.setdefault(tuple(prompt), len(place)) for prompt in prompts]
    return [list(prompt) for prompt in place], places
