"""Section ``buffer``: which tasks are explored, how they are judged, and how experiences become batches."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from rft_platform.config.schema.section import Options, Section, aliases

INPUT = "buffer.explorer_input"
_SELECTORS = {"offline_easy2hard": "easy_to_hard"}


class TaskFormat(Section):
    """Names of a task dataset's columns."""

    prompt_key: str | None = "question"
    """Column with the prompt; dots lead into nested columns (``data.question``). null: the tasks have no fixed columns,
    and your own workflow reads the whole row."""
    response_key: str | None = "answer"
    """Column with the reference answer. null: the tasks have no reference answer."""
    system_prompt: str | None = None
    """System message put before every prompt that has none."""


class RolloutArgs(Section):
    """Sampling parameters of a taskset. Unset keys come from ``model`` (``n``: ``algorithm.repeat_times``)."""

    temperature: NonNegativeFloat | None = None
    """Sampling temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = None
    """Sample from the ``top_k`` likeliest tokens."""
    max_tokens: PositiveInt | None = None
    """Limit of a response, in tokens."""
    n: PositiveInt | None = None
    """Runs per task."""


class TaskSelector(Section):
    """The order in which tasks are explored. It depends only on the seed, the step number and the earlier rounds."""

    selector_type: Annotated[
        Literal["sequential", "shuffle", "random", "easy_to_hard", "difficulty_based"],
        aliases(_SELECTORS),
    ] = "shuffle"
    """``shuffle``: a new permutation in each epoch. ``random``: each batch is drawn independently. ``easy_to_hard``:
    sorted within each epoch. ``difficulty_based``: tasks whose pass rate is probably near a target.
    ``offline_easy2hard`` is an alias of easy_to_hard."""
    feature_keys: list[str] = Field(default_factory=list)
    """Columns with the difficulty of a task. easy_to_hard sorts by them; for difficulty_based the first one holds an
    expected pass rate. Default: the measured pass rates."""
    args: Options = Field(default_factory=dict, validation_alias=AliasChoices("args", "kwargs"))
    """Options of the selector."""
    seed: NonNegativeInt | None = None
    """Default: the top-level ``seed``."""


REASONING_GYM = "reasoning_gym:"  #: begins the path of a taskset that the package reasoning-gym generates
MAX_ABS_REWARD = 1e6  #: default of ``max_abs_reward``


class WeightedJudge(Section):
    """One judge of a weighted sum of judges."""

    judge: str
    """Built-in name, or ``package.module:function``."""
    weight: float = 1.0
    """Factor of this judge's reward in the sum."""
    args: Options = Field(default_factory=dict)
    """Keyword arguments of the judge."""


JudgeChoice = Annotated[
    Annotated[str, Tag("name")] | Annotated[list[WeightedJudge], Tag("weighted")],
    Discriminator(lambda value: "weighted" if isinstance(value, list) else "name"),
]


#: Built-in workflows that read the whole row.
ROW_WORKFLOWS = ("tool_call", "frozen_lake")


def _default_judge(written: dict[str, Any]) -> str | None:
    """The default judge of a taskset that names none.

    A user's own workflow gets no default judge: it may return its own reward, which a judge would replace. Neither do
    the built-in workflows that read the whole row: a column of answers is not what their answers are compared with.
    """
    if str(written.get("path", "")).startswith(REASONING_GYM):
        return "reasoning_gym"
    has_answers = getattr(written.get("format"), "response_key", None) is not None
    workflow = written.get("workflow", "")
    return "exact_match" if has_answers and ":" not in workflow and workflow not in ROW_WORKFLOWS else None


def default_name(path: str, split: str) -> str:
    """The name of a taskset that has no name: that of its file, or of its folder or dataset with the split."""
    if path.startswith(REASONING_GYM):
        return f"{path.removeprefix(REASONING_GYM).partition('?')[0]}-{split}"
    local = Path(path)
    return local.stem if local.suffix else f"{local.name}-{split}"


class Taskset(Section):
    """A dataset, the workflow that solves its tasks and the judge that rewards the runs."""

    name: str | None = None
    """Default: the stem of ``path`` and the split."""
    storage_type: Literal["file"] = "file"
    """Tasks are read from files."""
    path: str
    """A JSONL, JSON, CSV or Parquet file, a folder of split files, the name of a Hugging Face dataset, or
    ``reasoning_gym:NAME?size=500&seed=0`` with further options of the dataset: tasks of the package reasoning-gym."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset, or subfolder of a folder."""
    format: TaskFormat = TaskFormat()
    rollout_args: RolloutArgs = RolloutArgs()
    workflow: str = Field(
        default="single_turn", validation_alias=AliasChoices("workflow", "default_workflow_type", "workflow_type")
    )
    """Built-in name, or ``package.module:function``."""
    workflow_args: Options = Field(default_factory=dict)
    """Keyword arguments of the workflow."""
    judge: JudgeChoice | None = Field(
        default_factory=_default_judge,
        validation_alias=AliasChoices("judge", "default_reward_fn_type", "reward_fn_type"),
    )
    """Built-in name, ``package.module:function``, a weighted list of judges, or null: the workflow returns its own
    reward. Default: exact_match for a built-in workflow on tasks with ``format.response_key``, null for your own
    workflow."""
    judge_args: Options = Field(default_factory=dict)
    """Keyword arguments of a single judge. In a list of judges each entry has its own ``args``."""
    reward_fn_args: Options = Field(default_factory=dict)
    """``task.reward_fn_args`` of a class-style workflow, which computes its own reward. Judges do not receive it."""
    judge_timeout_s: PositiveFloat | None = 600.0
    """Seconds that your own judge function may take per run (or per group) before it counts as failed; null: no limit.
    It also limits the rules math, code and reasoning_gym, in addition to their own time-outs. Model judges have their
    own time-outs."""
    max_abs_reward: PositiveFloat | None = MAX_ABS_REWARD
    """A run with a larger absolute reward counts as a failure of its judge: it is left out of training, reported, and
    never passes. null: any finite reward is accepted."""
    task_selector: TaskSelector = TaskSelector()
    limit: PositiveInt | None = None
    """Use only the first ``limit`` tasks."""

    @property
    def known_as(self) -> str:
        """The name of the taskset in rows, notes and metrics."""
        return self.name or default_name(self.path, self.split)

    @property
    def reads_rows(self) -> bool:
        """Whether the workflow is built-in and reads the whole row: rows with equal prompts may be different tasks."""
        return self.workflow in (*ROW_WORKFLOWS, "environment")


class ExploredTaskset(Taskset):
    """A taskset whose tasks are explored."""

    weight: PositiveFloat | None = None
    """Share of this taskset in the explored tasks, relative to the weights of the other entries of ``tasksets``. Set it
    for all entries or for none. Default: the number of the taskset's tasks, so that all epochs have the same length."""


class ExplorerInput(Section):
    """Tasks for exploration and for evaluation."""

    taskset: ExploredTaskset | None = None
    """The taskset to explore: ``tasksets`` with one entry."""
    tasksets: list[ExploredTaskset] = Field(default_factory=list)
    """Tasksets to explore, mixed by their weights. Each has its own workflow, judge, sampling parameters and order."""
    eval_tasksets: list[Taskset] = Field(default_factory=list)
    """Held-out tasksets, which are evaluated and not explored."""

    @model_validator(mode="after")
    def _taskset_or_tasksets(self) -> Self:
        if self.taskset is not None and self.tasksets:
            raise ValueError(
                "buffer.explorer_input.taskset and buffer.explorer_input.tasksets are both set: move the taskset into "
                "the list"
            )
        return self

    @property
    def explored(self) -> dict[str, ExploredTaskset]:
        """The tasksets to explore, by their keys."""
        if self.taskset is not None:
            return {f"{INPUT}.taskset": self.taskset}
        return {f"{INPUT}.tasksets[{index}]": taskset for index, taskset in enumerate(self.tasksets)}

    @property
    def every(self) -> dict[str, Taskset]:
        """All tasksets, explored and held out, by their keys."""
        held_out = {f"{INPUT}.eval_tasksets[{index}]": taskset for index, taskset in enumerate(self.eval_tasksets)}
        return {**self.explored, **held_out}


class PriorityArgs(Section):
    """Arguments of ``priority_fn``."""

    decay: NonNegativeFloat = 2.0
    """Priority = model_version - decay * use_count; the highest priority is served first."""


class ReplayBuffer(Section):
    """Train on experiences more than once: if a step has too few new experiences, used ones fill it."""

    enable: bool = False
    """Switches the replay of experiences on."""
    priority_fn: str = "linear_decay"
    """Order in which experiences are served: ``linear_decay``, or your own function of ``model_version``, ``use_count``
    and ``decay`` by reference (``pkg.mod:attr`` or ``/path/file.py:attr``). The highest priority is served first."""
    priority_fn_args: PriorityArgs = PriorityArgs()
    reuse_cooldown_time: NonNegativeFloat | None = None
    """Seconds before the same experience may be served again."""


class OfflineFormat(Section):
    """Names of an offline dataset's columns. A prompt or an answer is text or a list of messages."""

    prompt_type: Literal["messages", "plaintext", "chatpair"] | None = None
    """``messages``: whole conversations. ``plaintext``: prompt and answers as text. ``chatpair``: both as lists of
    messages. null: detected from the columns and their values."""
    messages_key: str = "messages"
    """Column with a conversation."""
    tools_key: str | None = None
    """Column with the tools available in the conversation. null: column ``tools`` if it exists."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    response_key: str | None = None
    """Column with the answer. null: ``response``, or else ``completion``."""
    chosen_key: str = "chosen"
    """Column with the better answer of a pair."""
    rejected_key: str = "rejected"
    """Column with the worse answer of a pair."""
    label_key: str = "label"
    """Column that says whether the answer of a row without a partner is desirable (kto): true or 1, false or 0."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""


class ExperienceBuffer(Section):
    """Where experiences are stored, and the dataset of an offline training."""

    storage_type: Literal["sql", "file", "queue"] = "file"
    """``sql`` without a taskset: online training, whose rows are production traffic. Otherwise without effect:
    experiences are Parquet files."""
    path: str | None = None
    """Dataset of an offline training (sft, pairs, labels, gkd): a JSONL, JSON, CSV or Parquet file, a folder of split
    files, or the name of a Hugging Face dataset. Online training: the database's URL (``sqlite:///FILE``,
    ``postgresql+psycopg2://...``); null: an SQLite file below ``RFT_HOME``. Other trainings ignore this key."""
    split: str = "train"
    """Split of an offline dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset, or subfolder of a folder."""
    format: OfflineFormat = OfflineFormat()
    limit: PositiveInt | None = None
    """Use only the first ``limit`` rows of an offline dataset."""
    replay_buffer: ReplayBuffer = ReplayBuffer()


class TrainerInput(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBuffer = ExperienceBuffer()


class Buffer(Section):
    """Batch sizes, the length of the run, and its inputs."""

    batch_size: PositiveInt = 32
    """Tasks per explore batch."""
    train_batch_size: PositiveInt | Literal["round"] | None = None
    """Experiences per optimiser step. Default: batch_size * repeat_times. ``round``: all experiences of the round, so
    that a round is one step, no matter how many model calls its runs made."""
    total_epochs: PositiveInt = 1
    """Passes over the taskset; used if ``total_steps`` is not set."""
    total_steps: PositiveInt | None = None
    """Explore batches of the whole run; a round has ``synchronizer.sync_interval`` of them. For an offline training:
    optimiser steps, instead of ``total_epochs`` passes."""
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()


#: Names of the judges that ask a model.
MODEL_JUDGES = ("llm", "pairwise", "ranking")
#: Arguments of these judges for time-outs, retries, concurrency, cache and budget. They do not change its version.
PATIENCE = ("timeout_s", "retries", "backoff_s", "concurrency", "cache", "budget", "on_invalid")
