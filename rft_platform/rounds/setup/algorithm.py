"""The configured algorithm as specifications: for the trainer, and for the pipeline of judged experiences.

``reference_folder`` and the functions after it fill the parts of a train request that need a project's folders;
``pipeline_of`` lists the operators, and ``check_operators`` refuses operators that do not exist or do not fit.
"""

from collections.abc import Iterator
from dataclasses import replace

from rft_platform.algorithms.advantages.registry import ADVANTAGES
from rft_platform.algorithms.plugins import import_plugins, plugins_digest
from rft_platform.algorithms.presets import Preset
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import UserError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.judging.execution.columns import experiences_of
from rft_platform.judging.execution.experience_pipeline import Operator, Pipeline
from rft_platform.judging.operators.dynamic_sampling import DYNAMIC_SAMPLING
from rft_platform.judging.operators.overlong_penalty import OVERLONG_PENALTY
from rft_platform.judging.operators.reward_filter import REWARD_FILTER
from rft_platform.judging.operators.std_filter import STD_FILTER
from rft_platform.judging.operators.surplus_groups import SURPLUS_GROUPS
from rft_platform.rounds.project.policy import required
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import model_folder

_CACHE_SHARE = 5  # maximum length divided by cache length, as in DAPO: 20,480 and 4,096 tokens


def loaded_digest(config: RftConfig) -> str | None:
    """Import the plugins and return the digest of their code; None without plugins."""
    import_plugins(config.algorithm.plugins)
    return plugins_digest(config.algorithm.plugins)


def pipeline_of(run: RunSettings) -> Pipeline:
    """The operators applied to a round's judged experiences before advantages are computed, in order.

    A configured operator replaces the algorithm's operator of the same name. Raises UserError for unknown names and
    options.
    """
    given = run.config.data_processor.experience_pipeline.operators
    named = {entry.name for entry in given}
    own = [entry for entry in _own_operators(run) if entry.name not in named]
    pipeline = Pipeline.of([*own, *given])
    if run.batches.max_batches == 1:
        return pipeline
    return Pipeline.of([*pipeline.operators, Operator(SURPLUS_GROUPS)])


def check_operators(run: RunSettings) -> None:
    """Raise UserError for operators that do not exist and for options that do not fit."""
    nothing = experiences_of([], [])
    pipeline = pipeline_of(run)
    for entry, function in zip(pipeline.operators, pipeline.functions, strict=True):
        if function.__module__.startswith("rft_platform."):  # with an empty batch these only check their options
            function(nothing, **entry.args)


def _own_operators(run: RunSettings) -> Iterator[Operator]:
    """The algorithm's operators: those of its preset, with the overrides of section ``filters``."""
    config, chosen, overlong = run.config, run.algorithm, run.config.algorithm.filters.overlong
    if chosen.drop_zero_variance:
        yield Operator(DYNAMIC_SAMPLING, {"max_batches": chosen.max_batches})
    if chosen.overlong_penalty:
        longest = overlong.max_length or config.model.response_limit
        cache = overlong.cache_length or max(1, longest // _CACHE_SHARE)
        lengths = {"max_length": longest, "cache_length": cache}
        yield Operator(OVERLONG_PENALTY, {**lengths, "weight": chosen.overlong_penalty})
    if chosen.reward_threshold is not None:
        yield Operator(REWARD_FILTER, {"threshold": chosen.reward_threshold})
    threshold = _std_threshold(chosen)
    if threshold is not None:
        yield Operator(STD_FILTER, {"threshold": threshold})


def _std_threshold(chosen: Preset) -> float | None:
    """The standard deviation at or below which the advantage drops a group; None if it has no such threshold."""
    option = ADVANTAGES.get(chosen.advantage).drops_at if chosen.advantage else None
    return chosen.advantage_args.get(option) if option else None


def reference_folder(project: Project, algorithm: AlgorithmSpec, policy: str = DEFAULT_POLICY) -> str | None:
    """The starting policy's folder if the algorithm needs a reference model; otherwise None."""
    always = project.settings.algorithm.reference == "always"
    needed = always or algorithm.beta or algorithm.kl_penalty is not None
    return required(project.store, 0, policy).folder if needed else None


def teacher_folder(project: Project) -> str | None:
    """The teacher's folder; None if the algorithm needs no teacher. Raises UserError if a needed teacher is not set."""
    settings = project.config.algorithm
    if not project.settings.algorithm.teacher:
        return None
    if settings.teacher_model_path is None:
        raise UserError(f"algorithm.teacher_model_path is not set: {settings.algorithm_type} learns from a teacher")
    return str(model_folder(project, settings.teacher_model_path, "algorithm.teacher_model_path"))


def spec_with_critic(project: Project) -> AlgorithmSpec:
    """The algorithm for the trainer, with the folder and the optimiser of its critic.

    The critic's learning-rate schedule ends with the project's last optimiser step.
    """
    spec, named = project.settings.spec, project.config.model.critic_model_path
    if spec.critic is None:
        return spec
    folder = None if named is None else str(model_folder(project, named, "model.critic_model_path"))
    optimizer = optimizer_spec(project.config.algorithm.critic, project.length.steps)
    return replace(spec, critic=replace(spec.critic, folder=folder, optimizer=optimizer))
