"""Every metric of the platform: name, kind, labels, meaning. Dashboards and alert rules use only these metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric. ``labels`` are label values, in the order of the label names in the catalogue."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """Kind, meaning and label names of a metric. Prometheus itself sets the labels ``job`` and ``instance``."""

    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


CATALOGUE: Mapping[str, Entry] = {
    "rft_project_info": Entry(
        "gauge",
        "constant 1; its labels name the project; online is true or false",
        ("project", "name", "mode", "online", "version"),
    ),
    "rft_rounds_budget": Entry("gauge", "rounds of the whole run"),
    "rft_rounds_done": Entry("gauge", "rounds trained, served and evaluated, counted from the first without a gap"),
    "rft_frontier_round": Entry("gauge", "round that the phase is running, or runs next", ("phase",)),
    "rft_rows": Entry("gauge", "rows of all rounds in the store: rollouts, judged (in force)", ("stage",)),
    "rft_frontier_rows": Entry("gauge", "rows of the round now explored", ("stage",)),
    "rft_policy_version_trained": Entry("gauge", "optimiser steps of the newest published policy"),
    "rft_policy_version_served": Entry("gauge", "policy version an engine serves", ("engine",)),
    "rft_policy_version_lag": Entry(
        "gauge", "optimiser steps that an engine of the first policy is behind the newest version", ("engine",)
    ),
    "rft_phase_running": Entry("gauge", "1 while a launch of the phase is running", ("phase",)),
    "rft_phase_failures": Entry("gauge", "failed launches of the next action since its last success", ("phase",)),
    "rft_plan_state": Entry(
        "gauge", "1 for the plan's state: launching, running, waiting, finished, failed", ("state",)
    ),
    "rft_failed_runs": Entry("gauge", "failed Dagster runs whose records are kept", ("dagster_job", "fault")),
    "rft_evaluation_round": Entry("gauge", "newest round with an evaluation on held-out tasks"),
    "rft_evaluation_score": Entry("gauge", "its score: sampled_pass, greedy_pass (0 to 1)", ("score",)),
    "rft_reward_mean": Entry("gauge", "mean reward of the newest judged round"),
    "rft_round_seconds": Entry("gauge", "seconds of the newest complete round, by phase", ("phase",)),
    "rft_last_progress_age_seconds": Entry("gauge", "seconds since a file of the newest rounds was written"),
    "rft_driver_running": Entry("gauge", "1 while `rft run` or `rft demo` drives the project"),
    "rft_daemon_heartbeat_age_seconds": Entry(
        "gauge", "seconds since the last heartbeat of a Dagster daemon", ("daemon",)
    ),
    "rft_engine_up": Entry("gauge", "1 if the engine answers, 0 if it has a lease and does not", ("engine",)),
    "rft_engine_requests_total": Entry("counter", "requests answered since the engine's start", ("engine",)),
    "rft_engine_prompt_tokens_total": Entry("counter", "prompt tokens since the engine's start", ("engine",)),
    "rft_engine_completion_tokens_total": Entry("counter", "sampled tokens since the engine's start", ("engine",)),
    "rft_engine_generate_seconds_total": Entry(
        "counter", "seconds spent generating since the engine's start", ("engine",)
    ),
    "rft_engine_weight_updates_total": Entry("counter", "weight updates since the engine's start", ("engine",)),
    "rft_trainer_up": Entry("gauge", "1 if the trainer answers, 0 if it has a lease and does not"),
    "rft_trainer_busy": Entry("gauge", "1 while the trainer works on a command"),
    "rft_trainer_cpu_seconds_total": Entry("counter", "processor seconds of all ranks since the trainer's start"),
    "rft_trainer_peak_rss_bytes": Entry("gauge", "largest memory of the trainer's first rank"),
    "rft_scrape_seconds": Entry("gauge", "seconds that this scrape took, by source", ("source",)),
    "rft_scrape_failed": Entry("gauge", "1 for a source that could not be read in this scrape", ("source",)),
}


def families(samples: Iterable[Sample]) -> list[Metric]:
    """The samples as Prometheus metric families, in the catalogue's order; raises KeyError for an unknown name."""
    by_name: dict[str, list[Sample]] = {name: [] for name in CATALOGUE}
    for sample in samples:
        by_name[sample.name].append(sample)
    return [_family(name, found) for name, found in by_name.items() if found]


def _family(name: str, samples: list[Sample]) -> Metric:
    entry = CATALOGUE[name]
    kind = CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily
    family = kind(name, entry.meaning, labels=entry.labels)
    for sample in samples:
        family.add_metric(list(sample.labels), sample.value)
    return family
