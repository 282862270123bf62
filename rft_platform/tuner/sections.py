"""The settings that callers of ``tune()`` give: the model, the dataset and the algorithm."""

import difflib
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rft_platform.common.errors import UserError


class TunerSection(BaseModel):
    """Settings with known fields, given by name.

    Unknown fields and values of the wrong type are refused, also when a field is set later.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, *positional: Any, **fields: Any) -> None:
            """Refuse positional arguments with a message that names the fields."""
            if positional:
                name, known = type(self).__name__, ", ".join(type(self).model_fields)
                raise TypeError(f"{name} takes its fields by name, got {positional!r}; its fields are {known}")
            if unknown := [field for field in fields if field not in type(self).model_fields]:
                raise TypeError(_unknown_field(type(self), unknown[0]))
            super().__init__(**fields)


class TunerModelConfig(TunerSection):
    """How a model is loaded, served and sampled."""

    model_path: str = Field(min_length=1)
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    max_model_len: int = Field(ge=1)
    """Tokens of prompt and answer together."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of calls that set none. Training needs a value above 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of calls that set none. Training needs 1.0."""
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


class DatasetConfig(TunerSection):
    """A dataset that ``datasets.load_dataset(path, name, split)`` can load; each row is the ``task`` of a run."""

    path: str = Field(min_length=1)
    """A folder with files such as train.jsonl, a JSONL, JSON, CSV or Parquet file, or a Hugging Face name."""
    name: str | None = None
    """Subset: a configuration of a Hugging Face dataset, or a folder inside ``path``."""
    split: str | None = "train"
    """A split; also a slice or a sum of splits: ``train[:100]``, ``train+test``."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    total_steps: int | None = Field(default=None, ge=1)
    """Training steps of ``batch_size`` tasks; overrides ``total_epochs``."""

    @property
    def split_or_train(self) -> str:
        """The split; ``train`` if none is named."""
        return self.split or "train"

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print the first ``n`` rows as JSON and return them. Raises UserError if the dataset cannot be read.

        A notebook does not show the returned rows again.
        """
        from rft_platform.tasks.sources import located_rows

        rows = _PrintedRows(row for _, _, row in islice(located_rows(self.path, self.split_or_train, self.name), n))
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return rows


class _PrintedRows(list[dict[str, Any]]):
    """Rows that were printed; a notebook cell that ends with them shows nothing more."""

    def _ipython_display_(self) -> None: ...


class AlgorithmConfig(TunerSection):
    """The algorithm and its intervals. One step explores ``batch_size`` tasks and makes one optimiser step."""

    algorithm_type: str = Field(default="multi_step_grpo", min_length=1)
    """An algorithm of docs/algorithms.md that learns from rewards."""
    learning_rate: float = Field(default=1e-6, gt=0)
    group_size: int = Field(default=8, ge=1)
    """Runs per task; they are compared with each other."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks per step."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Checkpoints at multiples of this number of steps keep their weights, as do the newest two and the best one."""
    eval_interval_steps: int = Field(default=100, ge=1)
    """Steps between evaluations; the start and the end are also evaluated."""


def check_argument_types(**arguments: tuple[Any, type[TunerSection]]) -> None:
    """Raise UserError for an argument that is neither None nor of its expected type.

    ``arguments`` maps each name to the value and the expected type.
    """
    for name, (value, expected) in arguments.items():
        if value is not None and not isinstance(value, expected):
            first = next(iter(expected.model_fields))
            raise UserError(f"tune: {name} is {value!r}; expected {expected.__name__}({first}=...)")


def _unknown_field(section: type[TunerSection], field: str) -> str:
    """Message for a field that ``section`` does not have."""
    near = difflib.get_close_matches(field, section.model_fields, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(section.model_fields)
    return f"{section.__name__} has no field {field!r}: {meant}its fields are {known}"
