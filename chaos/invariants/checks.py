"""All invariants of a project that has survived its kills, and the functions that check them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from chaos.invariants import reference as references
from chaos.invariants import services as services
from chaos.invariants import store as stored
from chaos.invariants.context import Context, Finding, Invariant
from chaos.invariants.copy import copy_equals_the_home
from chaos.invariants.machine import (
    no_lease_is_left,
    no_process_is_left,
    nothing_is_half_written,
    servers_hold_their_leases,
)
from chaos.records import Ended, Outcome, Violation
from rft_platform.config.home import Home

AT_THE_END: tuple[Invariant, ...] = (
    stored.row_ids_are_unique,
    stored.rows_are_complete,
    stored.rows_are_of_one_version,
    stored.rows_and_judgements_match,
    stored.files_are_as_written,
    stored.notes_are_complete,
    stored.checkpoints_are_whole,
    stored.checkpoints_are_all_published,
    stored.versions_follow_each_other,
    stored.weights_equal_the_undisturbed_run,
    services.every_policy_is_one_model_version,
    services.model_versions_point_at_their_weights,
    services.champion_was_evaluated,
    services.no_run_is_open,
    services.no_pool_slot_is_held,
    services.every_asset_of_every_round_is_known,
    services.every_failure_has_a_cause,
    references.rows_equal_the_undisturbed_run,
    references.notes_equal_the_undisturbed_run,
    references.checkpoints_equal_the_undisturbed_run,
    references.metrics_are_single,
    references.metrics_equal_the_undisturbed_run,
    references.model_versions_equal_the_undisturbed_run,
    references.checks_equal_the_undisturbed_run,
    copy_equals_the_home,
)
AFTER_STOP: tuple[Callable[[Home], Iterator[Finding]], ...] = (
    no_process_is_left,
    no_lease_is_left,
    nothing_is_half_written,
)


def check_open(home: Home, outcome: Outcome) -> None:
    """Check what must hold while the project's processes still run."""
    _add(outcome, servers_hold_their_leases.__name__, servers_hold_their_leases(home))


def check_stopped(home: Home, outcome: Outcome) -> None:
    """Check what must hold after all processes have ended."""
    for machine in AFTER_STOP:
        _add(outcome, machine.__name__, machine(home))


def check_project(context: Context, outcome: Outcome) -> None:
    """Check rows, checkpoints, MLflow and Dagster. A check that raises an exception is a violation, too."""
    for invariant in AT_THE_END:
        try:
            _add(outcome, invariant.__name__, invariant(context))
        except Exception as error:
            _add(outcome, invariant.__name__, [Finding(f"could not be checked: {type(error).__name__}: {error}")])
    _add(outcome, "every_end_is_a_clear_one", _unclear(outcome.ended))
    _add(outcome, "every_spare_node_is_used", _unused(outcome.facts))
    outcome.facts |= context.facts


def _unclear(ended: Sequence[Ended]) -> Iterator[Finding]:
    """A process that ended by itself must report a clear cause, not a traceback."""
    for end in ended:
        if not end.message.strip() or "Traceback (most recent call last)" in end.message:
            yield Finding(f"{end.role} ended with code {end.exit_code} and no clear cause:\n{end.message}")


def _unused(facts: Mapping[str, float]) -> Iterator[Finding]:
    """On Ray: a node that joined during the campaign got work."""
    added, used = facts.get("spare_nodes", 0), facts.get("spare_nodes_used", 0)
    if used < added:
        yield Finding(f"only {used:.0f} of {added:.0f} spare nodes ran a process of the project")


def _add(outcome: Outcome, invariant: str, found: Sequence[Finding] | Iterator[Finding]) -> None:
    last = tuple(injection.kill.number for injection in outcome.injections[-1:])
    for broken in found:
        kills = last if broken.round is None else outcome.kills_of_round(broken.round) or last
        name = invariant.replace("_", " ")
        outcome.violations.append(Violation(name, broken.message, outcome.mode, outcome.seed, kills, outcome.targets))
