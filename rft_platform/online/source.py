"""The production traffic of a project as its rounds see it: ``ProductionTraffic``."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import select

from rft_platform.common.errors import StorageError
from rft_platform.experience.file_names import round_key
from rft_platform.experience.notes import ASIDE
from rft_platform.model_registry.run_traces import GivenFeedback
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.releases.versions import policy_of_version, release_commands
from rft_platform.online.traffic.database import FIRST_IMPORTED, Call, Feedback, FeedbackCall, parts, readings
from rft_platform.online.traffic.demonstrations import collect_demonstrations, experts_of_traffic
from rft_platform.online.traffic.project_traffic import next_choice, round_rule, traffic_database, traffic_store
from rft_platform.online.traffic.round_rows import rows_of_traffic
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Demonstrations, Policy
from rft_platform.rounds.project.traffic_source import TakenRows, WaitingRows


class ProductionTraffic:
    """The traffic in the online service's database; the database is opened by the first call that needs it."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def waiting(self) -> WaitingRows:
        """The committed rows that no round has taken."""
        choice = next_choice(self._project)
        return WaitingRows(choice.waiting, len(choice.above_share))

    def training_pause(self) -> str | None:
        """The alerts that pause the training (``service.pause_training_on_alert``) in words; None: it is not paused."""
        if not self._project.config.service.pause_training_on_alert:
            return None
        alerts = traffic_store(self._project).open_alerts(pausing=True)
        return "; ".join(f"{text} (service.alerts.{name})" for name, text in alerts.items()) or None

    def take(self, round_number: int) -> TakenRows:
        """Record once which rows a round takes, and return them; a repeated call returns the same rows.

        Raises StorageError if no row is committed, or if another home has stored the rows of this round.
        """
        traffic = traffic_store(self._project)
        if traffic.is_consumed(round_number):
            self._refuse_rows_of_another_home(round_number)
        calls = traffic.settle(round_number, round_rule(self._project))
        if not calls:
            raise StorageError(
                f"{round_key(round_number)} has no committed rows of production traffic: commit feedback first"
            )
        subjects = {call.subject for call in calls if call.subject is not None}
        return TakenRows(rows_of_traffic(calls, round_number), len(subjects))

    def _refuse_rows_of_another_home(self, round_number: int) -> None:
        """Raise StorageError if the rows of this round were stored by another project, or by a home that is gone.

        If this home stored them, it has the round's rollout files, or its damaged ones in the folder ``aside``.
        """
        store = self._project.store
        if not store.rollout_files(round_number) and not (store.round_folder(round_number) / ASIDE).is_dir():
            raise StorageError(
                f"the database of production traffic has given its rows of {round_key(round_number)} to another home: "
                "each project needs its own database (buffer.trainer_input.experience_buffer.path), also a project "
                "that was started again in an empty home"
            )

    def consume(self, round_number: int) -> None:
        """Mark the rows of a round as stored."""
        traffic_store(self._project).consume(round_number)

    def demonstrations(self, round_number: int) -> Demonstrations:
        """Write the corrections that no earlier round took to the round's folder; a lost file is written again."""
        return collect_demonstrations(self._project, round_number)

    def experts(self, round_number: int, model_folder: Path) -> Path | None:
        """Write the corrections of all rounds up to this one for its training; None if there are none."""
        return experts_of_traffic(self._project, round_number, model_folder)

    def feedback_on(self, msg_ids: Sequence[str]) -> Mapping[str, list[GivenFeedback]]:
        """The feedback on each of these answers, oldest first; answers without feedback are left out.

        A feedback without value and comment, for example an erased one, is left out, too. So are corrections.
        """
        found: dict[str, list[GivenFeedback]] = defaultdict(list)
        with readings(traffic_database(self._project))() as session:
            for part in parts(msg_ids):
                query = (
                    select(Call.msg_id, Feedback)
                    .join(FeedbackCall, FeedbackCall.number == Call.number)
                    .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
                    .where(Call.msg_id.in_(part))
                    .order_by(Feedback.received_at, Feedback.feedback_id)
                )
                for msg_id, each in session.execute(query):
                    if each.value is not None or each.comment:
                        found[msg_id].append(GivenFeedback(each.feedback_id, each.metric, each.value, each.comment))
        return dict(found)

    def served_version(self) -> int | None:
        """The project's own version that a decision chose to serve; None: none did, or an imported version serves."""
        served = ReleaseStore(traffic_database(self._project)).served()
        return served if served is not None and served <= FIRST_IMPORTED else None

    def policies_in_release(self) -> list[Policy]:
        """Both versions of a running canary or A/B test, and the version that a roll-back would serve."""
        commands = release_commands(self._project)
        running = commands.store.running()
        versions = () if running is None else (running.base_version, running.candidate_version)
        fallback = commands.fallback()
        named = versions if fallback is None else (*versions, fallback)
        found = [policy_of_version(self._project, version) for version in named]
        return [policy for policy in found if policy is not None]

    def verdicts(self) -> Mapping[int, str | None]:
        """What withdrew each decided version, for example "canary 3"; None for a version that was chosen to serve."""
        return ReleaseStore(traffic_database(self._project)).verdicts()
