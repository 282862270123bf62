"""Section ``buffer``: which tasks are explored, how they are judged, and how experiences become batches."""

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from rft_platform.config.section import Section

_SELECTORS = {"offline_easy2hard": "easy_to_hard"}


class TaskFormat(Section):
    """Which columns of a dataset hold what."""

    prompt_key: str | None = "question"
    """Column with the prompt; null: the tasks have no fixed columns, and a workflow of yours reads the whole row."""
    response_key: str | None = "answer"
    """Column with the reference answer; null: the tasks have none."""
    system_prompt: str | None = None
    """Put before every prompt as the system message."""


class RolloutArgs(Section):
    """Sampling of one taskset; what is not given comes from section ``model`` (``n``: ``algorithm.repeat_times``)."""

    temperature: NonNegativeFloat | None = None
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    max_tokens: PositiveInt | None = None
    n: PositiveInt | None = None
    """Runs of a task."""


class TaskSelector(Section):
    """In which order tasks are explored: a function of the seed, the step number and the rounds before."""

    selector_type: Annotated[
        Literal["sequential", "shuffle", "random", "easy_to_hard", "difficulty_based"],
        BeforeValidator(lambda value: _SELECTORS.get(value, value)),
    ] = "shuffle"
    """``shuffle``: a new permutation each epoch. ``random``: each batch drawn anew. ``easy_to_hard``: sorted within
    each epoch. ``difficulty_based``: tasks whose pass rate is probably near a target. ``offline_easy2hard`` is an alias
    of easy_to_hard."""
    feature_keys: list[str] = Field(default_factory=list)
    """Columns that say how hard a task is. easy_to_hard: sorted by them; difficulty_based: the first holds an expected
    pass rate. Default: as measured."""
    args: dict[str, Any] = Field(default_factory=dict, validation_alias=AliasChoices("args", "kwargs"))
    """Options of the selector."""
    seed: NonNegativeInt | None = None
    """Default: the top-level ``seed``."""


MAX_ABS_REWARD = 1e6  #: default of ``max_abs_reward``


class WeightedJudge(Section):
    """One judge of a weighted sum."""

    judge: str
    """Built-in name, or ``package.module:function``."""
    weight: float = 1.0
    args: dict[str, Any] = Field(default_factory=dict)


JudgeChoice = Annotated[
    Annotated[str, Tag("name")] | Annotated[list[WeightedJudge], Tag("weighted")],
    Discriminator(lambda value: "weighted" if isinstance(value, list) else "name"),
]


def _default_judge(written: dict[str, Any]) -> str | None:
    """Where no judge is written: a workflow of the user's may reward itself, and nothing may replace what it says."""
    has_answers = getattr(written.get("format"), "response_key", None) is not None
    return "exact_match" if has_answers and ":" not in written.get("workflow", "") else None


class Taskset(Section):
    """A dataset, the workflow that solves its tasks and the judge that rewards the runs."""

    name: str | None = None
    """Default: the stem of ``path``, with the split."""
    storage_type: Literal["file"] = "file"
    path: str
    """A JSONL, JSON, CSV or Parquet file, a folder of split files, or the name of a Hugging Face dataset."""
    split: str = "train"
    subset_name: str | None = None
    format: TaskFormat = TaskFormat()
    rollout_args: RolloutArgs = RolloutArgs()
    workflow: str = Field(
        default="single_turn", validation_alias=AliasChoices("workflow", "default_workflow_type", "workflow_type")
    )
    """Built-in name, or ``package.module:function``."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    judge: JudgeChoice | None = Field(
        default_factory=_default_judge,
        validation_alias=AliasChoices("judge", "default_reward_fn_type", "reward_fn_type"),
    )
    """Built-in name, ``package.module:function``, a weighted list of judges, or null: the workflow rewards itself.
    Default: exact_match for a built-in workflow on tasks with ``format.response_key``, null for a workflow of yours."""
    judge_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a single judge; in a list each entry has its own ``args``."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    """What a class-style workflow, which rewards itself, finds as ``task.reward_fn_args``; no judge gets it."""
    judge_timeout_s: PositiveFloat | None = 600.0
    """Seconds that a judge function of yours may take for a run (or a group) before it counts as failed; null: no
    limit. It bounds the rules math and code too, beside time-outs of their own; models that judge have their own."""
    max_abs_reward: PositiveFloat | None = MAX_ABS_REWARD
    """A run whose reward is further from 0 than this counts as one that its judge failed on: it is left out, reported
    and never passes. null: any finite reward counts."""
    task_selector: TaskSelector = TaskSelector()
    limit: PositiveInt | None = None
    """Use the first so many tasks only."""


class ExplorerInput(Section):
    """Tasks for exploration and for evaluation."""

    taskset: Taskset | None = None
    eval_tasksets: list[Taskset] = Field(default_factory=list)


class PriorityArgs(Section):
    """Arguments of ``priority_fn``."""

    decay: NonNegativeFloat = 2.0
    """Priority = model_version - decay * use_count; the highest is served first."""


class ReplayBuffer(Section):
    """Serving experiences more than once: used ones fill a step that fresh ones leave short."""

    enable: bool = False
    priority_fn: str = "linear_decay"
    """Which are served first: ``linear_decay``, or a function of yours by reference (``pkg.mod:attr``, or
    ``/path/file.py:attr``) of ``model_version``, ``use_count`` and ``decay``; the highest goes first."""
    priority_fn_args: PriorityArgs = PriorityArgs()
    reuse_cooldown_time: NonNegativeFloat | None = None
    """Seconds before an experience may be served again."""


class OfflineFormat(Section):
    """Which columns of an offline dataset hold what. A prompt or an answer is text, or a list of messages."""

    prompt_type: Literal["messages", "plaintext", "chatpair"] | None = None
    """``messages``: whole conversations. ``plaintext``: prompt and answers as text. ``chatpair``: both as lists of
    messages. null: as the columns and their values tell."""
    messages_key: str = "messages"
    """Column with a conversation."""
    tools_key: str | None = None
    """Column with the tools that the conversation may use; null: ``tools`` where there is such a column."""
    prompt_key: str = "prompt"
    response_key: str | None = None
    """Column with the answer; null: ``response``, or else ``completion``."""
    chosen_key: str = "chosen"
    """Column with the better answer of a pair."""
    rejected_key: str = "rejected"
    """Column with the worse answer of a pair."""
    system_prompt: str | None = None
    """Put before every conversation that brings no system message."""


class ExperienceBuffer(Section):
    """Where explorer and trainer services of one project exchange experiences; the dataset of an offline training."""

    name: str = "experience_buffer"
    storage_type: Literal["sql", "file", "queue"] = "file"
    path: str | None = None
    """A database URL or a file; default: inside the checkpoint folder of the project. Of an offline training (sft, dpo,
    gkd): a JSONL, JSON, CSV or Parquet file, a folder of split files, or the name of a Hugging Face dataset."""
    split: str = "train"
    """Of an offline dataset."""
    subset_name: str | None = None
    format: OfflineFormat = OfflineFormat()
    limit: PositiveInt | None = None
    """Use the first so many rows of an offline dataset only."""
    replay_buffer: ReplayBuffer = ReplayBuffer()


class TrainerInput(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBuffer = ExperienceBuffer()


class Buffer(Section):
    """Batch sizes, the length of the run, and its inputs."""

    batch_size: PositiveInt = 32
    """Tasks an explore batch."""
    train_batch_size: PositiveInt | Literal["round"] | None = None
    """Experiences an optimiser step; default: batch_size * repeat_times. ``round``: all that a round has, however many
    calls its runs made, so that a round is one step."""
    total_epochs: PositiveInt = 1
    """Passes over the taskset, where ``total_steps`` is not given."""
    total_steps: PositiveInt | None = None
    """Explore batches of the whole run; a round is ``synchronizer.sync_interval`` of them. Of an offline training:
    optimiser steps, in place of ``total_epochs`` passes."""
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
