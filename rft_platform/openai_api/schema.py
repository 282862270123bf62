"""Request bodies of the OpenAI API, with their messages and tools, and an OpenAPI document of them.

Unknown fields are accepted; unknown fields of messages are passed to the chat template. Fields of OpenAI's API that the
engines do not support are refused by name.

Every number has bounds, so that every engine can sample and record a request that passes these checks.
"""

import json
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic.json_schema import models_json_schema

from rft_platform.common.errors import UserError
from rft_platform.openai_api.messages import check_variables, prompts_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class _Open(BaseModel):
    """A model that accepts and keeps unknown fields."""

    model_config = ConfigDict(extra="allow")


class ContentPart(_Open):
    """A part of a message's content; engines read only text parts."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(_Open):
    """The function of a tool call; ``arguments`` is a JSON text or a JSON object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(_Open):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(_Open):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(_Open):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Open):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(_Open):
    """The name of a function."""

    name: str


class ToolChoice(_Open):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


MAX_ROWS = 2048  # sequences that one request samples: prompts times choices
MAX_CHOICES = 1024
MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1  # rows store top_k as int32
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100.0  # at higher temperatures all tokens are about equally likely
MIN_TEMPERATURE = 1e-5  # at lower temperatures logits overflow; 0 is allowed and means greedy
MAX_STOPS = 64
MAX_SCHEMA_CHARACTERS = 65_536  # largest JSON schema of a response; the engine compiles the schema to a grammar

StopText = Annotated[str, Field(max_length=1024)]

#: Unsupported fields, which would change the distribution or the prompt, and their neutral values, which are accepted.
#: Recorded log-probs must be the policy's own, and every engine must treat the same request alike.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structural_tag": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_special_tokens": (None, False),
    "prompt_logprobs": (None,),
    "length_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1),
}


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """The schema that a response must follow."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    definition: dict[str, Any] = Field(alias="schema")

    @field_validator("definition")
    @classmethod
    def _refuse_what_is_long(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(value)) > MAX_SCHEMA_CHARACTERS:
            raise ValueError(f"the schema has more than {MAX_SCHEMA_CHARACTERS} characters")
        return value


class ResponseFormat(BaseModel):
    """The form of a response: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema with a name and a schema")
        return self


class SamplingBody(BaseModel):
    """Fields that chat and text completions share. Null means the default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOP_K)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _refuse_what_overflows(cls, value: float | None) -> float | None:
        if value and value < MIN_TEMPERATURE:
            raise ValueError(f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}")
        return value

    @model_validator(mode="after")
    def _refuse_what_cannot_be_honoured(self) -> "SamplingBody":
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this engine")
        return self

    def token_limit(self) -> int | None:
        """Maximum number of tokens to sample; None if the request sets no limit."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    def token_limit(self) -> int | None:
        """``max_completion_tokens``, the newer name of the field, takes precedence over ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens

    @field_validator("chat_template_kwargs")
    @classmethod
    def _refuse_reserved_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            check_variables(value or {})
        except UserError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', but the request has no tools")
        if self.forced_tool not in (None, "", *self.tool_names):
            raise ValueError(f"tool_choice names {self.forced_tool!r}, which is not among the tools {self.tool_names}")
        if self.asks_for_json and self.tools and self.tool_choice != "none":
            raise ValueError(
                "a response_format other than text excludes tool calls: send the request without tools, or with "
                "tool_choice 'none'"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_sent(cls, data: Any, handler: ModelWrapValidatorHandler["ChatBody"]) -> "ChatBody":
        """Keep messages and tools as they were sent: the order of their fields is part of the rendered prompt."""
        body = handler(data)
        body._sent = data if isinstance(data, dict) else {}
        return body

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as they were sent."""
        messages: list[dict[str, Any]] = self._sent["messages"]
        return messages

    @property
    def tool_names(self) -> list[str]:
        """Names of the offered functions."""
        return [tool.function.name for tool in self.tools or []]

    @property
    def tools_on_offer(self) -> list[dict[str, Any]] | None:
        """The tools shown to the model, as they were sent; None if the tool choice is "none"."""
        return None if self.tool_choice == "none" else self._sent.get("tools")

    @property
    def asks_for_json(self) -> bool:
        """Whether the response must be JSON, which is sampled under a grammar."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def forced_tool(self) -> str | None:
        """The function that must be called; "" for any function; None if the model may choose."""
        if isinstance(self.tool_choice, ToolChoice):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_rows(self) -> "CompletionBody":
        if self.prompt == []:
            raise ValueError("prompt: expected a text, a list of token ids, or a list of these")
        prompts, n = len(prompts_of(self.prompt)), self.n or 1
        if prompts * n > MAX_ROWS:
            raise ValueError(
                f"prompt: {prompts} prompts with n={n} are {prompts * n} sequences; a request may have at most "
                f"{MAX_ROWS}"
            )
        return self


class ResponsesBody(_Open):
    """Body of POST /v1/responses: the fields that the gateway reads; others are passed on to the chat endpoint."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None


BODIES: dict[str, type[BaseModel]] = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    RESPONSES: ResponsesBody,
}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of the recording gateway: its routes, their bodies and the key that they require."""
    bodies = [(model, "validation") for model in BODIES.values()]
    references, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    answers = {"200": {"description": "The answer"}, "4XX": {"description": "An error object of OpenAI's API"}}
    paths: dict[str, Any] = {
        path: {"post": {"requestBody": _json_body(references[model, "validation"]), "responses": answers}}
        for path, model in BODIES.items()
    }
    paths["/v1/models"] = {"get": {"responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Recording gateway", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}
