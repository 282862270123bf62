"""vLLM's scheduler, changed: if nobody streams an answer, its tokens reach the API server in pieces of many tokens.

vLLM's engine process sends its API server one message entry per request and step. With log-probs, each entry holds
three arrays of one element. At hundreds of running requests both processes then need more time for these arrays than
the GPU needs for the step. This scheduler collects the tokens and log-probs of a request and sends them every ``PIECE``
tokens.

vLLM creates the scheduler by its import path (``--scheduler-cls``). vLLM's scheduler interface is not public:
``InPieces`` uses ``add_request``, ``finish_requests`` and ``update_from_output``. The tests of all engines cover this
scheduler.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

#: Tokens of a piece (speculative decoding adds a few). The arrays of a piece must be shorter than 256 bytes: vLLM sends
#: longer arrays as separate frames, and vLLM 0.24 then reuses the buffer of a large first frame as soon as the last
#: frame is sent.
PIECE = 48
_MOST_A_STEP = 15  # most tokens of a request in one step


def scheduler(**options: Any) -> Any:
    """The scheduler of one engine process; ``options`` are those that vLLM gives to its own scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = options["vllm_config"]
    base = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    owners = (config.model_config, getattr(config, "aux_output_config", None))  # vLLM 0.24, 0.32
    if any(getattr(owner, "enable_return_routed_experts", False) for owner in owners):
        return base(**options)  # no pieces: the expert routing of each step must be sent with the step's tokens
    return type("PieceScheduler", (InPieces, base), {})(**options)


@dataclass(slots=True)
class _Piece:
    """The tokens and log-probs that a request has generated since its last message."""

    wants_logprobs: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    prefill_stats: Any = None

    def add(self, output: Any, steps: "_StepLogprobs | None") -> None:
        """Collect the tokens of ``output``, an ``EngineCoreOutput`` of one step."""
        self.token_ids += output.new_token_ids
        self.events += output.events or []
        self.prefill_stats = self.prefill_stats or output.prefill_stats
        if steps is not None and self.wants_logprobs:
            rows = steps.rows(output.request_id, len(output.new_token_ids))
            self.logprobs += steps.logprobs[rows]
            self.ranks += steps.ranks[rows]

    def move_to(self, output: Any) -> None:
        """Move all collected tokens and log-probs into ``output``, and begin the next piece."""
        output.new_token_ids = self.token_ids
        output.events = self.events or None
        output.prefill_stats = self.prefill_stats
        output.new_logprobs = self._table() if self.wants_logprobs and self.token_ids else None
        self.token_ids, self.logprobs, self.ranks, self.events, self.prefill_stats = [], [], [], [], None

    def _table(self) -> Any:
        from vllm.v1.outputs import LogprobsLists

        return LogprobsLists(
            np.asarray(self.token_ids, dtype=np.int32)[:, None],
            np.asarray(self.logprobs, dtype=np.float32)[:, None],
            np.asarray(self.ranks, dtype=np.int32),
        )


class _StepLogprobs:
    """Log-probs and ranks of the tokens that one step has sampled."""

    def __init__(self, runner_output: Any) -> None:
        """``runner_output``: a ``ModelRunnerOutput`` with log-probs; its first column is that of the sampled tokens."""
        table = runner_output.logprobs
        self.logprobs: list[float] = table.logprobs[:, 0].tolist()
        self.ranks: list[int] = table.sampled_token_ranks.tolist()
        self._starts: list[int] | None = table.cu_num_generated_tokens
        self._index: dict[str, int] = runner_output.req_id_to_index

    def rows(self, request_id: str, count: int) -> slice:
        """The positions of a request's ``count`` tokens in ``logprobs`` and ``ranks``."""
        index = self._index[request_id]
        start = index if self._starts is None else self._starts[index]
        return slice(start, start + count)


class InPieces:
    """Mixin that overrides methods of a scheduler class of vLLM."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pieces: dict[str, _Piece] = {}  # by request id

    def add_request(self, request: Any) -> None:
        """Queue a request, and remember whether its answer may come in pieces."""
        super().add_request(request)  # type: ignore[misc]
        if comes_in_pieces(request) and self.num_spec_tokens < _MOST_A_STEP:  # type: ignore[attr-defined]
            self._pieces[request.request_id] = _Piece(request.sampling_params.logprobs is not None)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests that a caller cancels; their collected tokens are dropped."""
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        known = self.requests  # type: ignore[attr-defined]
        self._pieces = {name: piece for name, piece in self._pieces.items() if name in known}
        return ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update the requests after a step; returns the messages for the API server, by client."""
        steps = None
        if self._pieces and model_runner_output.logprobs is not None:
            steps = _StepLogprobs(model_runner_output)
            if self._pieces.keys() >= scheduler_output.num_scheduled_tokens.keys():
                # Without this, vLLM would cut the arrays into one slice per request, although all requests come in
                # pieces.
                model_runner_output = replace(model_runner_output, logprobs=None)
        messages = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self._pieces:
            for message in messages.values():
                message.outputs = [output for output in message.outputs if self._sent_now(output, steps)]
        return messages

    def _sent_now(self, output: Any, steps: _StepLogprobs | None) -> bool:
        """Whether ``output`` is sent to the API server now; if so, add all collected tokens to it."""
        piece = self._pieces.get(output.request_id)
        if piece is None:
            return True
        piece.add(output, steps)
        if output.finish_reason is None and len(piece.token_ids) < PIECE:
            return False
        piece.move_to(output)
        if output.finish_reason is not None:
            del self._pieces[output.request_id]
        return True


def comes_in_pieces(request: Any) -> bool:
    """Whether the tokens of a request are needed only at its end, so that they can be sent in few messages.

    This is false for requests with stop strings, because the API server must search for these strings after every
    token, and for requests with more log-probs than that of the sampled token.
    """
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.stop
        and sampling.logprobs in (None, 0)
        and not sampling.logprob_token_ids
        and sampling.prompt_logprobs is None
        and not getattr(sampling, "prompt_logprob_token_ids", None)
        and not getattr(request, "resumable", False)
    )
