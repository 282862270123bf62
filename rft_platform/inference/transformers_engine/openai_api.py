"""The OpenAI-compatible routes: chat completions, completions and models."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response, StreamingResponse

from rft_platform.common import json_codec
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.inference.serving.api_errors import ApiError, describe
from rft_platform.inference.serving.context_limit import check_text
from rft_platform.inference.serving.openai_schema import ChatBody, CompletionBody, SamplingBody
from rft_platform.inference.transformers_engine.answer_text import AnswerText
from rft_platform.inference.transformers_engine.engine import TransformersEngine
from rft_platform.inference.transformers_engine.openai_answers import AnswerForm, ChunkBuilder, usage, whole_answer
from rft_platform.inference.transformers_engine.output_parsers import CALL_OPEN, ReasoningParser, ToolCallParser
from rft_platform.inference.transformers_engine.request import Request, TokenEvent

LARGE_BYTES = 1 << 18  # a larger body is parsed in a thread
COMPLETION_TOKENS = 16  # OpenAI's default for plain completions
_NO_GRAMMAR = (
    "response_format is not supported by the embedded engine, which cannot sample under a grammar: set engine.kind: "
    "vllm, or ask for JSON in the prompt, or offer a tool"
)


@dataclass
class Work:
    """A chat or completion request in the form that ``_answer`` handles."""

    body: SamplingBody
    prompts: list[list[int]]
    top_logprobs: int
    default_max_tokens: int
    form: AnswerForm
    parse_tools: bool = False
    prefix: str = ""  # forced beginning of the answer, already part of the prompt
    reasoning_after: str | None = None  # the prompt's text if reasoning is separated from the answer, else None

    def texts(self, engine: TransformersEngine, rows: int, stops: tuple[str, ...]) -> list[AnswerText]:
        """One text builder per row."""
        return [
            AnswerText(
                engine.tokenizer.decode,
                stops,
                ToolCallParser() if self.parse_tools else None,
                self.prefix,
                None if self.reasoning_after is None else ReasoningParser(self.reasoning_after),
            )
            for _ in range(rows)
        ]


def install(app: FastAPI, engine: TransformersEngine) -> None:
    """Add the routes below /v1. They render and tokenise in threads, because long texts take time."""
    router = APIRouter(prefix="/v1", route_class=JsonRoute)
    entries = {
        name: {"id": name, "object": "model", "owned_by": "rft", "max_model_len": engine.max_model_len}
        for name in (engine.model_path.name, str(engine.model_path))
    }

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(entries.values())}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        found = entries.get(name) or entries.get(f"/{name}")
        if found is None:
            raise _unknown_model(engine, name)
        return found

    @router.post("/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        return await _answer(engine, await asyncio.to_thread(_chat_work, engine, body), http)

    @router.post("/completions")
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await _answer(engine, await asyncio.to_thread(_completion_work, engine, body), http)

    app.include_router(router)


def _chat_work(engine: TransformersEngine, body: ChatBody) -> Work:
    if body.asks_for_json:
        raise ApiError(400, _NO_GRAMMAR, "invalid_value", "response_format")
    form = _form(engine, body, chat=True, logprobs=bool(body.logprobs))
    text = engine.template.text(body.conversation, body.tools_on_offer, body.chat_template_kwargs)
    prefix = "" if body.forced_tool is None else forced_beginning(body.forced_tool)
    return Work(
        body,
        [_encoded(engine, text + prefix)],
        top_logprobs=body.top_logprobs or 0,
        default_max_tokens=engine.max_model_len,
        form=form,
        parse_tools=bool(body.tools_on_offer),
        prefix=prefix,
        reasoning_after=text if engine.parses_reasoning and not prefix else None,
    )


def _completion_work(engine: TransformersEngine, body: CompletionBody) -> Work:
    form = _form(engine, body, chat=False, logprobs=body.logprobs is not None)
    return Work(body, _prompts(engine, body), body.logprobs or 0, COMPLETION_TOKENS, form)


def _prompts(engine: TransformersEngine, body: CompletionBody) -> list[list[int]]:
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise ApiError(400, "prompt is empty", "invalid_value", "prompt")
    return [_encoded(engine, each) if isinstance(each, str) else each for each in given]


def _encoded(engine: TransformersEngine, text: str) -> list[int]:
    check_text(text, engine.max_model_len)
    (ids,) = engine.tokenizer.encode([text])
    return ids


def forced_beginning(tool: str) -> str:
    """The beginning of an answer that must call ``tool``, or any tool if ``tool`` is empty.

    The beginning ends at a token boundary: the model samples the following space, which is part of the token `` {"``.
    """
    return f"{CALL_OPEN}\n" + (f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "arguments":' if tool else "")


def _form(engine: TransformersEngine, body: SamplingBody, chat: bool, logprobs: bool) -> AnswerForm:
    known = (engine.model_path.name, str(engine.model_path))
    if body.model is not None and body.model not in known:
        raise _unknown_model(engine, body.model)
    return AnswerForm(chat, body.model or known[0], engine.tokenizer, logprobs, bool(body.return_token_ids))


def _unknown_model(engine: TransformersEngine, name: str) -> ApiError:
    message = f"the model {name!r} does not exist: this engine serves {engine.model_path.name!r}"
    return ApiError(404, message, "model_not_found", "model")


async def _answer(engine: TransformersEngine, work: Work, http: HttpRequest) -> Response:
    sampling = work.body.sampling(work.default_max_tokens)
    if work.body.stream:
        return await _streamed_answer(engine, work, http)
    request = engine.submit(work.prompts, sampling, work.top_logprobs)
    await finished(engine, request, http)
    texts = work.texts(engine, request.rows, sampling.stop)
    return JSONResponse(whole_answer(work.form, request, texts), headers=version_header(request))


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

    sampling = work.body.sampling(work.default_max_tokens)
    request = engine.submit(work.prompts, sampling, work.top_logprobs, on_token=post)
    request.future.add_done_callback(lambda _: post(None))
    # The policy version is known from the first token on. A failure before this token can still set the HTTP status.
    first = await _first_event(engine, request, events, http)
    if first is None:
        request.future.result()
    builders = [
        ChunkBuilder(work.form, request, row, text)
        for row, text in enumerate(work.texts(engine, request.rows, sampling.stop))
    ]
    chunks = _chunks(engine, request, first, events, builders, work.body.includes_usage)
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
    builders: list[ChunkBuilder],
    with_usage: bool,
) -> AsyncIterator[str]:
    form = builders[0].form
    try:
        for builder in builders if form.chat else []:
            yield _event(builder.first())
        while event is not None:
            tops = [event.top]
            for chunk in builders[event.row].add([event.token_id], [event.logprob], tops, event.finish_reason):
                yield _event(chunk)
            event = await events.get()
        error = request.future.exception()
        if isinstance(error, Exception):
            yield _event(describe(error)[1])
            return
        for builder in builders:
            for chunk in [] if builder.finished else builder.add([], [], [], "abort"):
                yield _event(chunk)
        if with_usage:
            yield _event({**form.envelope(request, [], chunk=True), "usage": usage(request)})
        yield "data: [DONE]\n\n"
    finally:
        if not request.future.done():  # the caller disconnected
            engine.scheduler.cancel(request)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


class JsonRequest(HttpRequest):
    """A request whose body is strict JSON."""

    async def json(self) -> Any:
        """The parsed body. Raises JSONDecodeError, which becomes status 400, if the body is not JSON."""
        body = await self.body()
        try:
            if len(body) > LARGE_BYTES:
                return await asyncio.to_thread(json_codec.parse, body)
            return json_codec.parse(body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route that receives ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, called with a ``JsonRequest``."""
        handler = super().get_route_handler()

        async def handle(request: HttpRequest) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
