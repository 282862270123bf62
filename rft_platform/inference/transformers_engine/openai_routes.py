"""The OpenAI-compatible routes: chat completions, completions and models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from rft_platform.inference.interface import VERSION_HEADER, SamplingParams
from rft_platform.inference.serving.control_api import disconnected
from rft_platform.inference.serving.request_body import MAX_BODY_BYTES, parsing_route
from rft_platform.inference.transformers_engine.engine import TransformersEngine
from rft_platform.inference.transformers_engine.request import Request, TokenEvent
from rft_platform.openai_api.answers import AnswerForm, ChoiceBuilder, ServedModel
from rft_platform.openai_api.errors import ApiError, describe
from rft_platform.openai_api.messages import prompts_of
from rft_platform.openai_api.parsers import THINK_OPEN, AnswerText, OutputParser, forced_beginning
from rft_platform.openai_api.schema import ChatBody, CompletionBody, SamplingBody
from rft_platform.openai_api.streams import END_OF_STREAM, data_event
from rft_platform.openai_api.tokenizer import check_text

T = TypeVar("T")

COMPLETION_TOKENS = 16  # OpenAI's default for plain completions
_NO_GRAMMAR = (
    "response_format is not supported by the embedded engine, which cannot sample under a grammar: set engine.kind: "
    "vllm, or ask for JSON in the prompt, or offer a tool"
)


@dataclass
class SamplingRequest:
    """A checked chat or completion request: its prompts, sampling parameters, and the form of its answer."""

    body: SamplingBody
    form: AnswerForm
    sampling: SamplingParams
    top_logprobs: int
    tools: bool = False  # whether tool calls are separated from the answer
    reasoning: bool = False  # whether reasoning is separated from the answer
    begun: str = ""  # beginning of the answer that is part of the prompt

    def builders(self, engine: TransformersEngine, request: Request) -> list[ChoiceBuilder]:
        """One builder per row."""
        self.form.policy_version = request.policy_version
        return [ChoiceBuilder(self.form, row, self._text(engine)) for row in range(request.rows)]

    def _text(self, engine: TransformersEngine) -> AnswerText:
        parsed = self.reasoning or self.tools
        parser = OutputParser(self.begun, reasoning=self.reasoning, tools=self.tools) if parsed else None
        return AnswerText(engine.tokenizer.decode, self.sampling.stop, parser)


def install(app: FastAPI, engine: TransformersEngine) -> None:
    """Add the routes below /v1. They render and tokenise in threads, because long texts take time."""
    router = APIRouter(prefix="/v1", route_class=parsing_route(MAX_BODY_BYTES))

    @router.get("/models")
    async def models() -> dict[str, Any]:
        served = _served(engine)
        return {"object": "list", "data": [served.entry(name) for name in served.names]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _served(engine).entry(name)

    @router.post("/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        return await _answer(engine, await asyncio.to_thread(_chat_request, engine, body), http)

    @router.post("/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await _answer(engine, await asyncio.to_thread(_completion_request, engine, body), http)

    app.include_router(router)


def _served(engine: TransformersEngine) -> ServedModel:
    return ServedModel(engine.model_path, engine.max_model_len)


def _chat_request(engine: TransformersEngine, body: ChatBody) -> SamplingRequest:
    if body.asks_for_json:
        raise ApiError(400, _NO_GRAMMAR, "invalid_value", "response_format")
    model = _model_name(engine, body)
    text = engine.template.text(body.conversation, body.tools_on_offer, body.chat_template_kwargs)
    prefix = "" if body.forced_tool is None else forced_beginning(body.forced_tool)
    reasoning = engine.parses_reasoning and not prefix
    sampling = sampling_of(body, engine.max_model_len)
    prompts = [_encoded(engine, text + prefix)]
    return SamplingRequest(
        body,
        AnswerForm(
            True, model, engine.tokenizer, bool(body.logprobs), bool(body.return_token_ids), prompts, sampling.n
        ),
        sampling,
        top_logprobs=body.top_logprobs or 0,
        tools=bool(body.tools_on_offer),
        reasoning=reasoning,
        begun=THINK_OPEN if reasoning and text.rstrip().endswith(THINK_OPEN) else prefix,
    )


def _completion_request(engine: TransformersEngine, body: CompletionBody) -> SamplingRequest:
    model, wants_logprobs = _model_name(engine, body), body.logprobs is not None
    prompts = [_encoded(engine, each) if isinstance(each, str) else each for each in prompts_of(body.prompt)]
    sampling = sampling_of(body, COMPLETION_TOKENS)
    form = AnswerForm(False, model, engine.tokenizer, wants_logprobs, bool(body.return_token_ids), prompts, sampling.n)
    return SamplingRequest(body, form, sampling, body.logprobs or 0)


def sampling_of(body: SamplingBody, default_max_tokens: int) -> SamplingParams:
    """The sampling parameters of a request."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_tokens=body.token_limit() or default_max_tokens,
        n=body.n or 1,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,
        seed=body.seed,
        stop=tuple(text for text in stop if text),
    )


def _encoded(engine: TransformersEngine, text: str) -> list[int]:
    check_text(text, engine.max_model_len)
    (ids,) = engine.tokenizer.encode([text])
    return ids


def _model_name(engine: TransformersEngine, body: SamplingBody) -> str:
    if body.model is not None:
        _served(engine).check(body.model)
    return body.model or engine.model_path.name


async def _answer(engine: TransformersEngine, asked: SamplingRequest, http: HttpRequest) -> Response:
    if asked.body.stream:
        return await _streamed_answer(engine, asked, http)
    request = engine.submit(asked.form.prompts, asked.sampling, asked.top_logprobs)
    await _awaited(engine, request, asyncio.wrap_future(request.future), http)
    choices = [
        builder.whole(done.token_ids, done.logprobs, request.tops[row], done.finish_reason)
        for row, builder in enumerate(asked.builders(engine, request))
        for done in [request.results[row]]
    ]
    return JSONResponse(asked.form.whole(choices, request.sampled), headers=version_header(request))


async def _awaited(engine: TransformersEngine, request: Request, wanted: "asyncio.Future[T]", http: HttpRequest) -> T:
    """Wait for a result or event of ``request``; cancel ``request`` if its caller disconnects before."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            engine.scheduler.cancel(request)
        return await wanted
    finally:
        gone.cancel()


def version_header(request: Request) -> dict[str, str]:
    """Header with the policy version that sampled the response."""
    return {VERSION_HEADER: str(request.policy_version)}


async def _streamed_answer(engine: TransformersEngine, asked: SamplingRequest, http: HttpRequest) -> Response:
    events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(event: TokenEvent | None) -> None:
        with suppress(RuntimeError):  # the server is shutting down and its loop is closed
            loop.call_soon_threadsafe(events.put_nowait, event)

    request = engine.submit(asked.form.prompts, asked.sampling, asked.top_logprobs, on_token=post)
    request.future.add_done_callback(lambda _: post(None))
    # The policy version is known from the first token on. A failure before this token can still set the HTTP status.
    first = await _awaited(engine, request, asyncio.ensure_future(events.get()), http)
    if first is None:
        request.future.result()
    chunks = _chunks(engine, request, first, events, asked)
    return StreamingResponse(chunks, media_type="text/event-stream", headers=version_header(request))


async def _chunks(
    engine: TransformersEngine,
    request: Request,
    event: TokenEvent | None,
    events: "asyncio.Queue[TokenEvent | None]",
    asked: SamplingRequest,
) -> AsyncIterator[bytes]:
    form, builders = asked.form, asked.builders(engine, request)
    try:
        for row in range(request.rows) if form.chat else ():
            yield data_event(form.first_chunk(row))
        while event is not None:
            tops = [event.top]
            for chunk in builders[event.row].add([event.token_id], [event.logprob], tops, event.finish_reason):
                yield data_event(chunk)
            event = await events.get()
        error = request.future.exception()
        if isinstance(error, Exception):
            yield data_event(describe(error)[1])
            return
        for builder in builders:
            for chunk in [] if builder.finished else builder.add([], [], [], "abort"):
                yield data_event(chunk)
        if asked.body.includes_usage:
            yield data_event(form.usage_chunk(request.sampled))
        yield END_OF_STREAM
    finally:
        if not request.future.done():  # the caller disconnected
            engine.scheduler.cancel(request)
