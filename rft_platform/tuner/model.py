"""Settings of the model to tune, and of auxiliary models."""

from pydantic import Field

from rft_platform.tuner.section import TunerSection


class TunerModelConfig(TunerSection):
    """How a model is loaded, served and sampled."""

    model_path: str = Field(min_length=1)
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    max_model_len: int = Field(ge=1)
    """Tokens of prompt and answer together."""
    temperature: float = Field(default=1.0, ge=0)
    """For calls that set none. Training needs a value above 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """For calls that set none. Training needs 1.0."""
    max_tokens: int = Field(default=8192, ge=1)
    """Maximum tokens of an answer, for calls that set no limit; reduced to fit into the context."""
    enable_thinking: bool | None = None
    """Switch of the chat template; None: the template's own default."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per engine (vLLM)."""
    inference_engine_num: int = Field(default=1, ge=1)
    """Number of engines that share the work."""
    tool_call_parser: str = "hermes"
    """Format of tool calls in an answer."""
    reasoning_parser: str | None = "deepseek_r1"
    """Format of reasoning in an answer; the default applies only to models whose tokenizer knows ``</think>``."""
