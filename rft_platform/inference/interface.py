"""The policy engine's interface, which every implementation (transformers, vLLM, a pool) provides.

The data plane is the OpenAI HTTP subset at ``base_url`` plus the token-in / token-out calls below. The control plane
changes weights, pauses and reports state. Token ids are those of the policy's tokenizer. Log-probs are natural
logarithms under the sampling distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

PauseMode = Literal["keep", "abort", "wait"]
FinishReason = Literal["stop", "length", "abort"]
VERSION_HEADER = "x-policy-version"  # of every answer of an engine or gateway: the policy version that gave it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. ``top_k`` -1 and ``top_p`` 1.0 do not truncate; temperature 0 is greedy."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    first_prompt: int = 0
    """Index of this call's first prompt within the whole batch.

    Seeded draws depend on (seed, index of the prompt, choice, position). A batch that is split over several engines is
    therefore sampled as one engine would sample it.
    """

    def request_fields(self) -> dict[str, Any]:
        """The parameters as fields of an OpenAI request, except ``n`` and ``seed``; those that are off are left out."""
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        if self.top_k > 0:
            fields["top_k"] = self.top_k
        if self.stop:
            fields["stop"] = list(self.stop)
        return fields


def greedy(sampling: SamplingParams) -> SamplingParams:
    """The same parameters with greedy decoding, without truncation of the distribution."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class PartialBatch:
    """A batch that may end before all its completions do, and that may continue answers of an earlier batch.

    The call returns once all completions of ``enough`` groups have ended. The other completions come back as far as
    they were sampled, with the finish reason ``abort``. An engine process counts the groups that it samples itself, so
    with several processes a batch may end with some groups more or fewer.
    """

    groups: Sequence[int]  # the group of each prompt
    enough: int
    at_once: int  # completions that are sampled at the same time; the others wait, in the order of the prompts
    sampled: Sequence[int]  # how many last tokens of each prompt were sampled before; they count towards ``max_tokens``

    def part(self, start: int, stop: int) -> "PartialBatch":
        """The same for the prompts from ``start`` to ``stop`` (exclusive), with their shares of the numbers."""
        groups = self.groups[start:stop]
        enough = math.ceil(self.enough * len(set(groups)) / max(1, len(set(self.groups))))
        at_once = math.ceil(self.at_once * len(groups) / max(1, len(self.groups)))
        return PartialBatch(groups, enough, at_once, self.sampled[start:stop])


@dataclass(slots=True)
class Completion:
    """One sampled continuation. ``token_ids`` and ``logprobs`` have equal length and include the end token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(slots=True)
class Generation:
    """The ``n`` completions of one prompt."""

    prompt_ids: list[int]
    completions: list[Completion]
    policy_version: int


@dataclass(slots=True)
class EngineStatus:
    """Answer of ``PolicyEngine.status``."""

    engine: str  # "transformers" or "vllm", with its version
    model_path: str  # folder given at the start; its name is the model's name in the OpenAI API for all weights
    policy_version: int
    weights_digest: str
    template_hash: str
    paused: bool
    dtype: str
    max_model_len: int
    pid: int
    cpu_seconds: float  # processor time of the server since its start
    capabilities: list[str] = field(default_factory=list)
    weights_path: str = ""  # folder of the current weights
    model_digest: str = ""  # of configuration, tokenizer and templates in ``model_path``
    started_at: float = 0.0  # seconds since the epoch


class PolicyEngine(Protocol):
    """A running engine. Every method raises ``EngineError`` if the engine does not answer."""

    @property
    def base_url(self) -> str:
        """Root of the OpenAI-compatible API, ending in ``/v1``."""
        ...

    @property
    def api_key(self) -> str:
        """The key that the API at ``base_url`` requires."""
        ...

    def status(self) -> EngineStatus:
        """Health, identity and the current policy version."""
        ...

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Apply the chat template: prompt ids of each conversation, with the generation prompt."""
        ...

    def generate(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> list[Generation]:
        """Sample ``sampling.n`` completions of every prompt, in one call, without detokenising.

        With ``partial`` the call may return before all completions have ended.
        """
        ...

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        """Text of each sequence, without special tokens."""
        ...

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        ...

    def score_everywhere(self, sequences: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Call ``score`` on every active process; returns the log-probs by the process's URL."""
        ...

    def fetch_weights(self, folder: Path) -> None:
        """Bring the weights in ``folder`` to the engine's machine, if it does not see them; requests go on."""
        ...

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Replace the weights in place by the safetensors of ``folder`` (full weights or a LoRA adapter).

        An adapter is served on the full weights that it was trained on, which its files name.
        Requests already running finish on the old weights. Prefix caches are dropped.
        """
        ...

    def pause(self, mode: PauseMode = "wait") -> None:
        """Hold new requests; ``abort`` ends running requests, ``wait`` lets them finish, ``keep`` freezes them."""
        ...

    def resume(self) -> None:
        """Serve again after a pause."""
        ...

    def sleep(self) -> None:
        """Free the GPU's memory for a trainer on the same GPU, once running requests have finished.

        The next request, score or weight update wakes the engine. An engine that cannot sleep does nothing.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Counters since the start: requests, prompt_tokens, completion_tokens, generate_seconds, weight_updates."""
        ...

    def shutdown(self) -> None:
        """End the server process and remove its lease; a process that somebody else runs is left alone."""
        ...
