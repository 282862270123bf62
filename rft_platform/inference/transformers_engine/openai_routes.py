"""The OpenAI-compatible routes: chat completions, completions and models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from rft_platform.inference.interface import VERSION_HEADER, SamplingParams
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

COMPLETION_TOKENS = 16  # OpenAI's default for plain completions
_NO_GRAMMAR = (
    "response_format is not supported by the embedded engine, which cannot sample under a grammar: set engine.kind: "
    "vllm, or ask for JSON in the prompt, or offer a tool"
)


@dataclass
class Work:
    """A chat or completion request in the form that ``_answer`` handles."""

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
        return await _answer(engine, await asyncio.to_thread(_chat_work, engine, body), http)

    @router.post("/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await _answer(engine, await asyncio.to_thread(_completion_work, engine, body), http)

    app.include_router(router)


def _served(engine: TransformersEngine) -> ServedModel:
    return ServedModel(engine.model_path, engine.max_model_len)


def _chat_work(engine: TransformersEngine, body: ChatBody) -> Work:
    if body.asks_for_json:
        raise ApiError(400, _NO_GRAMMAR, "invalid_value", "response_format")
    model = _model_name(engine, body)
    text = engine.template.text(body.conversation, body.tools_on_offer, body.chat_template_kwargs)
    prefix = "" if body.forced_tool is None else forced_beginning(body.forced_tool)
    reasoning = engine.parses_reasoning and not prefix
    sampling = sampling_of(body, engine.max_model_len)
    prompts = [_encoded(engine, text + prefix)]
    return Work(
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


def _completion_work(engine: TransformersEngine, body: CompletionBody) -> Work:
    model, wants_logprobs = _model_name(engine, body), body.logprobs is not None
    prompts = [_encoded(engine, each) if isinstance(each, str) else each for each in prompts_of(body.prompt)]
    sampling = sampling_of(body, COMPLETION_TOKENS)
    form = AnswerForm(False, model, engine.tokenizer, wants_logprobs, bool(body.return_token_ids), prompts, sampling.n)
    return Work(body, form, sampling, body.logprobs or 0)


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


async def _answer(engine: TransformersEngine, work: Work, http: HttpRequest) -> Response:
    if work.body.stream:
        return await _streamed_answer(engine, work, http)
    request = engine.submit(work.form.prompts, work.sampling, work.top_logprobs)
    await finished(engine, request, http)
    choices = [
        builder.whole(done.token_ids, done.logprobs, request.tops[row], done.finish_reason)
        for row, builder in enumerate(work.builders(engine, request))
        for done in [request.results[row]]
    ]
    return JSONResponse(work.form.whole(choices, request.sampled), headers=version_header(request))


async def finished(engine: TransformersEngine, request: Request, http: HttpRequest) -> None:
    """Wait for ``request``; cancel it when its caller disconnects."""
    result: asyncio.Future[Any] = asyncio.wrap_future(request.future)
    disconnected: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({result, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            engine.scheduler.cancel(request)
        await result
    finally:
        disconnected.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def version_header(request: Request) -> dict[str, str]:
    """Header with the policy version that sampled the response."""
    return {VERSION_HEADER: str(request.policy_version)}


async def _streamed_answer(engine: TransformersEngine, work: Work, http: HttpRequest) -> Response:
    events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(event: TokenEvent | None) -> None:
        with suppress(RuntimeError):  # the server is shutting down and its loop is closed
            loop.call_soon_threadsafe(events.put_nowait, event)

    request = engine.submit(work.form.prompts, work.sampling, work.top_logprobs, on_token=post)
    request.future.add_done_callback(lambda _: post(None))
    # The policy version is known from the first token on. A failure before this token can still set the HTTP status.
    first = await _first_event(engine, request, events, http)
    if first is None:
        request.future.result()
    chunks = _chunks(engine, request, first, events, work)
    return StreamingResponse(chunks, media_type="text/event-stream", headers=version_header(request))


async def _first_event(
    engine: TransformersEngine, request: Request, events: "asyncio.Queue[TokenEvent | None]", http: HttpRequest
) -> TokenEvent | None:
    """Wait for the first event of a streamed request; cancel the request if its caller disconnects before."""
    first = asyncio.ensure_future(events.get())
    disconnected = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({first, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            engine.scheduler.cancel(request)
        return await first
    finally:
        disconnected.cancel()


async def _chunks(
    engine: TransformersEngine,
    request: Request,
    event: TokenEvent | None,
    events: "asyncio.Queue[TokenEvent | None]",
    work: Work,
) -> AsyncIterator[bytes]:
    form, builders = work.form, work.builders(engine, request)
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
        if work.body.includes_usage:
            yield data_event(form.usage_chunk(request.sampled))
        yield END_OF_STREAM
    finally:
        if not request.future.done():  # the caller disconnected
            engine.scheduler.cancel(request)
