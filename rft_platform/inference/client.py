"""Client of an engine process: ``PolicyEngine`` over HTTP.

A batch may take long, so its request has a long time-out. During the request a thread probes an engine of the cluster.
If the engine does not answer the probes (it is stopped or hangs), the client ends the engine, and the request fails
with a retryable EngineError.
"""

import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from pydantic_core import from_json

from rft_platform.cluster.interface import Address, Cluster, tls_context
from rft_platform.common import json_codec
from rft_platform.common.errors import (
    EngineError,
    RftError,
    StorageError,
    UserError,
    WeightMismatchError,
    WeightsAbsentError,
)
from rft_platform.inference.http_contract import api_key_of
from rft_platform.inference.interface import (
    Completion,
    EngineStatus,
    Generation,
    PartialBatch,
    PauseMode,
    SamplingParams,
)
from rft_platform.object_store.weights import stored_weights
from rft_platform.observability.log_context import context_headers

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 3600.0  # a whole batch is one request
STATUS_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
PROBE_INTERVAL_S = 10.0  # between two probes of the engine while a request runs
HEARTBEAT_TIMEOUT_S = 120.0  # the client ends an engine that answers no probe for this long
LOG = logging.getLogger(__name__)


class EngineClient:
    """HTTP client of one running engine; safe to share between threads. A whole batch of prompts is one request."""

    def __init__(
        self,
        address: Address | str,
        cluster: Cluster | None = None,
        *,
        token: str = "",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        """``address``: that of the engine, or its URL (``http://host:port``) with its ``token``.

        An engine of ``cluster`` is ended if it answers no probe for ``heartbeat_timeout_s`` during a request. Without a
        cluster somebody else runs the engine, and this client never ends it.
        """
        self.address = address if isinstance(address, Address) else Address("", _root(address), token)
        self._cluster, self.heartbeat_timeout_s = cluster, heartbeat_timeout_s
        self.api_key = api_key_of(self.address.token)
        self._http = httpx.Client(
            base_url=f"{self.url}/engine",
            headers={"Authorization": f"Bearer {self.address.token}"} if self.address.token else {},
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=httpx.HTTPTransport(verify=tls_context(), trust_env=False, socket_options=_keep_alive()),
            trust_env=False,  # a proxy set in the environment must not get requests to the loopback interface
        )
        self._close = weakref.finalize(self, self._http.close)

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return self.address.url

    @property
    def base_url(self) -> str:
        """Root of the OpenAI-compatible API, ending in ``/v1``."""
        return f"{self.url}/v1"

    def status(self) -> EngineStatus:
        """Health, identity and the current policy version."""
        return status_in(self._answer("status", timeout_s=STATUS_TIMEOUT_S), f"the engine at {self.url}")

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Apply the chat template: prompt ids of each conversation, with the generation prompt."""
        ids: list[list[int]] = self._post("render", conversations=list(conversations), tools=tools)["ids"]
        return ids

    def generate(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> list[Generation]:
        """Sample ``sampling.n`` completions of every prompt, in one call, without detokenising."""
        early = None if partial is None else asdict(partial)
        answer = self._post("generate", prompts=list(prompts), sampling=asdict(sampling), partial=early)
        columns = zip(prompts, answer["token_ids"], answer["logprobs"], answer["finish_reasons"], strict=True)
        return [
            Generation(prompt, list(map(Completion, ids, logprobs, reasons)), answer["policy_version"])
            for prompt, ids, logprobs, reasons in columns
        ]

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        """Text of each sequence, without special tokens."""
        texts: list[str] = self._post("decode", sequences=list(sequences))["texts"]
        return texts

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        logprobs: list[list[float]] = self._post("score", sequences=list(sequences))["logprobs"]
        return logprobs

    def score_everywhere(self, sequences: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """As ``score``, by the engine's URL; the result has one entry, because this client has one process."""
        return {self.url: self.score(sequences)}

    def fetch_weights(self, folder: Path) -> None:
        """Let the engine's machine fetch the weights in ``folder``, if it does not see the home: it serves meanwhile.

        Raises WeightsAbsentError if the home has no copy on an object store, StorageError if the fetch fails.
        """
        folder = folder.absolute()
        if not folder.is_dir() or self._post("fetch_weights", folder=str(folder))["here"]:
            return  # a folder that is nowhere is refused when it is loaded
        if (stored := stored_weights(folder)) is None:
            raise WeightsAbsentError(f"the machine of the engine at {self.url} does not see {folder}")
        self._post("fetch_weights", folder=str(folder), stored=stored)

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Swap the weights in place; if they do not fit, keep the old ones and raise WeightMismatchError.

        Raises the errors of ``fetch_weights``, too.
        """
        self.fetch_weights(folder)
        self._post("update_weights", folder=str(folder.absolute()), policy_version=policy_version)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Hold new requests; ``abort`` ends running requests, ``wait`` lets them finish, ``keep`` freezes them."""
        self._post("pause", mode=mode)

    def resume(self) -> None:
        """Serve again after a pause."""
        self._post("resume")

    def sleep(self) -> None:
        """Free the engine's GPU memory until the next request; an engine that cannot sleep does nothing."""
        self._post("sleep")

    def metrics(self) -> dict[str, float]:
        """Counters since the start: requests, prompt_tokens, completion_tokens, generate_seconds, weight_updates."""
        return self._post("metrics")

    def shutdown(self) -> None:
        """End the engine; does nothing if it has already ended, or if somebody else runs it."""
        if self._cluster is not None:
            self._cluster.stop(self.address.name, SHUTDOWN_TIMEOUT_S, generation=self.address.generation)

    def close(self) -> None:
        """Close the connections; the engine keeps running."""
        self._close()

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, name: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = from_json(self._answer(name, **body))
        return answer

    def _answer(self, name: str, timeout_s: float | None = None, **body: Any) -> bytes:
        try:
            with self._watched():
                response = self._http.post(
                    f"/{name}",
                    content=json_codec.dump(body),
                    headers={**context_headers(), "Content-Type": "application/json"},
                    timeout=timeout_s or self._http.timeout,
                )
        except httpx.HTTPError as error:
            raise EngineError(
                f"the engine at {self.url} does not answer {name}: {error or type(error).__name__}"
            ) from error
        if response.status_code == 200:
            return response.content
        raise self._refusal(name, response)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the engine if it stops answering during the block, so that the block's request fails early."""
        if self._cluster is None:  # somebody else runs the engine: only the request's time-out applies
            yield
            return
        answered = threading.Event()
        arguments = (self._cluster, self.address, answered, self.heartbeat_timeout_s)
        watch = threading.Thread(target=_end_if_silent, args=arguments, daemon=True)
        watch.start()
        try:
            yield
        finally:
            answered.set()

    def _refusal(self, name: str, response: httpx.Response) -> RftError:
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = response.text[:500]
        kinds: dict[int, type[RftError]] = {400: UserError, 409: WeightMismatchError, 507: StorageError}
        kind = kinds.get(response.status_code, EngineError)
        return kind(f"the engine at {self.url} refuses {name} ({response.status_code}): {message}")


def status_in(answer: bytes, server: str) -> EngineStatus:
    """The status in an answer of ``server``. Raises UserError if it is no status, or that of another version."""
    try:
        return EngineStatus(**from_json(answer))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{server} is not an engine of this version of the platform (its /engine/status: {error}): correct the "
            "address, or start the engine with this version"
        ) from error


def _end_if_silent(cluster: Cluster, address: Address, answered: threading.Event, limit_s: float) -> None:
    """Probe the engine until the request is answered; end it if it answers no probe for ``limit_s``."""
    alive_at = time.monotonic()
    while not answered.wait(PROBE_INTERVAL_S):
        running = cluster.find(address.name)
        if running is not None and running.generation != address.generation:
            return  # the process has ended, so the request fails anyway
        if running is not None and cluster.answers(address):
            alive_at = time.monotonic()
        elif time.monotonic() - alive_at > limit_s:
            pid = address.details["pid"]
            LOG.warning("the engine at %s (pid %s) sent no heartbeat for %g s and is ended", address.url, pid, limit_s)
            cluster.stop(address.name, STOP_TIMEOUT_S, generation=address.generation)
            return


def _keep_alive() -> list[tuple[int, int, int]]:
    """Options of a connection, by which the system ends it 90 s after the other machine has vanished."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
