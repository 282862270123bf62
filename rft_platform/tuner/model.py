"""The model to tune, and the models beside it."""

from pydantic import Field

from rft_platform.tuner.section import TunerSection


class TunerModelConfig(TunerSection):
    """How a model is loaded, served and sampled."""

    model_path: str = Field(min_length=1)
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    max_model_len: int = Field(ge=1)
    """Tokens of prompt and answer together."""
    temperature: float = Field(default=1.0, ge=0)
    """Of calls that name none. Training wants a value above 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of calls that name none. Training wants 1.0."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most tokens of an answer, where a call names no other limit; what exceeds the context is cut off."""
    enable_thinking: bool | None = None
    """Switch of the chat template; None: the template's own default."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one engine spans (vLLM)."""
    inference_engine_num: int = Field(default=1, ge=1)
    """Engines that share the work."""
    tool_call_parser: str = "hermes"
    """How tool calls stand in an answer."""
    reasoning_parser: str | None = "deepseek_r1"
    """How thoughts stand in an answer; left at its default it is for models whose tokenizer knows ``</think>``."""
