"""Section ``prompt_search``: the search for a better system prompt, as a comparison for the training."""

from pydantic import Field, PositiveInt

from rft_platform.config.schema.section import Options, Section


class PromptSearch(Section):
    """How `rft prompt optimise` searches for a system prompt."""

    reflection: Options = Field(min_length=1)
    """The model that proposes prompts: ``model`` is the name of one of ``explorer.auxiliary_models`` or ``{base_url,
    model, api_key_env}``, as of the judge ``llm``; ``temperature``, ``max_tokens`` and its other arguments that are not
    about criteria are accepted too."""
    start: str | None = None
    """The prompt that the search starts from. Default: ``format.system_prompt`` of the first explored taskset."""
    tasks: PositiveInt = 32
    """The search uses this many tasks of the first explored taskset, drawn with the seed."""
    runs: PositiveInt = 500
    """Runs of the workflow after which the search ends; more than ``tasks``, which the starting prompt takes. A prompt
    that is being measured then is measured to its end, so up to ``tasks`` and two minibatches more are possible."""
    minibatch: PositiveInt = 4
    """Runs that the model reads before it proposes a prompt. The prompt is measured on all ``tasks`` if it is better on
    these."""
