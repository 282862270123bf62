"""Section ``service``: the online service, which serves the policy to production clients."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rft_platform.config.schema.reward_formula import REWARD, RewardFormula
from rft_platform.config.schema.section import Section


class DeclaredMetric(Section):
    """A metric that feedback may have in addition to the reward."""

    name: str = Field(min_length=1, max_length=100)
    """Name of the metric; ``reward`` declares the valid rewards."""
    level: Literal["run", "call"] = "run"
    """``call``: feedback with this metric must name the answers that it rates."""
    type: Literal["float", "boolean"] = "float"
    """``boolean``: 0 or 1."""
    min: float | None = None
    """Smallest valid value. null: no limit."""
    max: float | None = None
    """Largest valid value. null: no limit."""

    @model_validator(mode="after")
    def _has_values(self) -> "DeclaredMetric":
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"service.metrics {self.name}: min {self.min} is more than max {self.max}")
        return self


def _check_train_on(service: "Service") -> None:
    """Raise ValueError unless the formula names metrics with known bounds, and implicit rewards take part in it."""
    formula, declared = RewardFormula.parse(service.train_on), {metric.name: metric for metric in service.metrics}
    for name in sorted(formula.names - {REWARD}):
        if name not in declared:
            raise ValueError(f"service.train_on names {name!r}, which service.metrics does not declare")
    for name in sorted(formula.names & declared.keys()):
        metric = declared[name]
        if metric.type != "boolean" and (metric.min is None or metric.max is None) and formula.names != {REWARD}:
            raise ValueError(f"service.train_on names {name!r}: give it min and max in service.metrics")
    if service.implicit_feedback is not None and REWARD not in formula.names:
        raise ValueError(
            f"service.train_on {service.train_on!r} does not name reward, which service.implicit_feedback gives: "
            "leave one of them out"
        )


class Alerts(Section):
    """Limits for statistics of the traffic and of the training. If a limit is exceeded, the status page, the log and
    the events show a warning. null: no alert."""

    window_s: PositiveFloat = 86_400.0
    """The statistics cover the calls of the last ``window_s`` seconds."""
    least_calls: PositiveInt = 50
    """No alert while fewer calls were recorded."""
    invalid_rate: float | None = Field(default=None, ge=0, le=1)
    """Largest share of calls with an invalid tool call."""
    invalid_reward: float | None = None
    """Largest mean reward of calls with an invalid tool call."""
    question_rate: float | None = Field(default=None, ge=0, le=1)
    """Largest share of answers that end with a question."""
    label_rate: float | None = Field(default=None, ge=0, le=1)
    """Smallest share of calls that get a reward."""
    label_delay_s: PositiveFloat | None = None
    """Largest 95th percentile of the time from an answer to its reward."""
    served_delay_s: PositiveFloat | None = None
    """Largest 95th percentile of the time from a reward until weights that were trained on it answer."""
    refused_in_a_row: PositiveInt | None = 3
    """Largest number of versions in a row that are refused or withdrawn. It does not depend on ``least_calls``."""


class ImplicitFeedback(Section):
    """Rewards from the user's next message: a judge model says whether the previous answer satisfied the user."""

    base_url: str
    """Address of the model's OpenAI API."""
    model: str
    """Name of the model there."""
    api_key_env: str | None = None
    """The environment variable with the key. null: no key."""
    interval_s: PositiveFloat = 10.0
    """Seconds between two queries for new messages."""
    within_s: PositiveFloat = 86_400.0
    """Answers older than this number of seconds are not judged."""
    concurrency: PositiveInt = 4
    """Maximum number of concurrent requests to the model."""


class Service(Section):
    """The online service (``rft serve``). Its address is ``explorer.listen_address`` and ``explorer.proxy_port``."""

    record_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of runs and conversations whose calls are recorded; all of them are served."""
    freshness_hours: PositiveFloat | None = 24.0
    """Dagster shows the asset ``online_experiences`` as overdue if no traffic was committed for this time, and warns
    after half of it. null: never."""
    selection: list[str] = Field(default_factory=list)
    """Your own selection strategies by reference (``pkg.mod:attr``, ``/path/file.py:attr``). A call that one of them
    accepts is recorded; ``record_rate`` decides on all other calls."""
    metrics: list[DeclaredMetric] = Field(default_factory=list)
    """Metrics that feedback may have, with their valid values. ``reward`` is from 0 to 1 unless it is declared here. If
    other metrics are declared, feedback with another one is refused, else any metric is accepted."""
    train_on: str = "reward"
    """The reward as a formula over metrics, as in ``0.7*solved + 0.3*helpful``: numbers, names, ``+ - * /`` and
    parentheses. Every metric in it except ``reward`` must be declared, with ``min`` and ``max`` or as a boolean. A call
    has a reward when it has the value of each metric in the formula."""
    redaction: str | None = None
    """Your function from text to text by reference (``pkg.mod:attr``, ``/path/file.py:attr``), which removes personal
    data before calls and feedback are stored. A call whose text it changes is not trained on."""
    group_deadline_s: PositiveFloat = 3600.0
    """Group algorithms: seconds after a task's first label until it is committed with fewer than
    ``algorithm.repeat_times`` runs."""
    most_choices: PositiveInt = Field(default=8, le=1024)
    """Largest number of choices of a request (``n``, for several prompts ``n`` times their number)."""
    task_share: float | None = Field(default=None, gt=0, le=1)
    """Largest share of a round's rows that one task may have. A larger task is left out as a whole. null: an
    automatic limit (docs/online.md). 1: no limit."""
    subject_share: float | None = Field(default=None, gt=0, le=1)
    """Largest share of a round's rows that one subject may have; its further tasks wait for a later round. All rows of
    a tenant without a subject count as one subject. null: an automatic limit. 1: no limit."""
    tenant_share: float | None = Field(default=None, gt=0, le=1)
    """Largest share of a round's rows that the requests with one API key may have. null: an automatic limit. 1: no
    limit."""
    pause_training_on_alert: bool = False
    """While an alert is open, no round collects rows or trains. `rft models resume` ends the pause."""
    commit_interval_s: PositiveFloat | None = None
    """Seconds between commits that the service makes itself. null: only clients commit."""
    retention_days: PositiveFloat = 7.0
    """Days until the text of a call without a reward, or in the state `untrainable` or `stale`, is erased; calls with a
    correction stay."""
    most_waiting: NonNegativeInt = 10_000
    """Calls that may wait for the database. Further ones are served and not recorded; they are counted."""
    max_body_mib: PositiveFloat = Field(default=4.0, le=32)
    """Largest request body, in MiB."""
    max_connections: PositiveInt = 4096
    """Largest number of open connections. A further one closes the connection that has waited longest for its client;
    if none waits, the further one is closed. The limit of open files may reduce this number."""
    requests_per_minute: PositiveInt | None = None
    """Maximum number of OpenAI calls of a tenant per minute; the same limit holds separately for its other requests.
    A request above the limit gets status 429. Without API keys all callers are one tenant. null: no limit."""
    tokens_per_minute: PositiveInt | None = None
    """Maximum number of tokens (prompts and answers) of a tenant per minute. A request counts its possible answer until
    it is answered, then its actual tokens. null: no limit."""
    concurrent_requests: PositiveInt | None = None
    """Maximum number of concurrent OpenAI calls of a tenant; the same limit holds separately for its other requests.
    null: no limit."""
    token_price: NonNegativeFloat | None = None
    """Price of a million tokens (prompts and answers), for the cost of each API key on the page of production calls of
    `rft view`. null: no cost is shown."""
    implicit_feedback: ImplicitFeedback | None = None
    """null: only people and programs reward answers."""
    alerts: Alerts = Alerts()
    weight_update: Literal["together", "rolling"] = "together"
    """How several replicas (``explorer.rollout_model.engine_num``) take new weights. ``together``: all at the same
    time; requests wait until the weights are loaded. ``rolling``: one after another. The log-probs of each replica are
    compared with the trainer's before the next replica follows, and all replicas return to the previous weights if a
    comparison fails. For an imported version only the digest of the weights is compared."""
    least_in_service: PositiveInt = 1
    """Replicas that take requests at any time of a rolling update."""
    canary_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the traffic that a newly released version gets as a canary, until its success rate promotes it or rolls
    it back. 0: a newly released version serves all traffic at once."""

    @model_validator(mode="after")
    def _trains_on_metrics(self) -> "Service":
        _check_train_on(self)
        return self
