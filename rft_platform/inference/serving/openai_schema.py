"""Bodies of the OpenAI plane. Unknown fields are accepted; known ones that cannot be honoured are refused by name."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft_platform.inference.interface import SamplingParams

MAX_CHOICES = 1024
MAX_TOP_LOGPROBS = 20

#: Fields that would change the distribution or the prompt, and the values of them that do not. What is recorded must be
#: the policy's own log-probs, and the same request must mean the same to every engine.
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
}


class StreamOptions(BaseModel):
    """What a streamed answer carries besides the text."""

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """What both kinds of completion share. A null means the default."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _refuse_what_cannot_be_honoured(self) -> "SamplingBody":
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this engine")
        return self

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """The request's sampling parameters."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=self.token_limit() or default_max_tokens,
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            seed=self.seed,
            stop=tuple(text for text in stop if text),
        )

    def token_limit(self) -> int | None:
        """Tokens to sample at most, where the request says so."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        """The newer name of the field wins."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        for message in self.messages:
            if not isinstance(message.get("role"), str):
                raise ValueError("messages: every message needs a role")
        if self.forced_tool not in (None, "", *self.tool_names):
            raise ValueError(f"tool_choice names {self.forced_tool!r}, which is not among the tools {self.tool_names}")
        return self

    @property
    def tool_names(self) -> list[str]:
        """Names of the functions on offer."""
        return [str((tool.get("function") or {}).get("name")) for tool in self.tools or []]

    @property
    def tools_on_offer(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of: none where the choice is "none"."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def forced_tool(self) -> str | None:
        """The function that must be called, "" for any; None where the model is free."""
        if isinstance(self.tool_choice, dict):
            return str((self.tool_choice.get("function") or {}).get("name"))
        return "" if self.tool_choice == "required" and self.tools else None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
