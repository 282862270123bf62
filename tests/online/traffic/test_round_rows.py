"""The choice of a round's rows: no rating, user or key fills a round, and small projects still train."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from rft_platform.online.traffic.round_rows import ChosenRows, CommittedRow, RoundRule, choose_rows

ROWS = 100
RULE = RoundRule(most_rows=ROWS, most_choices=8)  # what a configuration without limits gives


class Traffic:
    """Committed rows, by their number."""

    def __init__(self) -> None:
        self.rows: list[CommittedRow] = []

    def add(
        self, rows: int, *, tenant: str = "", subject: str | None = None, task: str | None = None, message: str = ""
    ) -> "Traffic":
        for _ in range(rows):
            number = len(self.rows)
            msg_id = message or f"m{number}"
            self.rows.append(CommittedRow(number, tenant, task or msg_id, msg_id, subject, 0))
        return self

    def choose(self, rule: RoundRule = RULE) -> ChosenRows:
        return choose_rows(self.rows, rule)

    def subjects(self, rule: RoundRule = RULE) -> Counter[str | None]:
        """The round's rows by their subject."""
        return Counter(self.rows[number].subject for number in self.choose(rule).chosen)


def honest(traffic: Traffic, users: int = 60, rows: int = 3) -> Traffic:
    for _ in range(rows):
        for user in range(users):
            traffic.add(1, subject=f"user{user}")
    return traffic


def test_an_answer_with_too_many_choices_is_left_out() -> None:
    traffic = Traffic().add(1000, message="poison").add(200)
    assert traffic.choose().above_share == list(range(1000))
    split = Traffic()
    for number in range(1000):  # each choice under a task of its own
        split.add(1, message="poison", task=f"t{number}")
    assert len(split.add(200).choose().above_share) == 992


def test_one_rating_of_many_answers_does_not_fill_a_round() -> None:
    traffic = Traffic().add(400, task="poison").add(200)
    choice = traffic.choose()
    assert choice.above_share == list(range(400))
    assert len(choice.chosen) == ROWS
    assert len(Traffic().add(25, task="large").add(200).choose().above_share) == 0
    assert len(Traffic().add(26, task="large").add(200).choose().above_share) == 26


@pytest.mark.parametrize("subject", ["flooder", None])
def test_a_user_with_many_tasks_gets_a_tenth_of_a_round(subject) -> None:
    traffic = honest(Traffic().add(1000, subject=subject))
    chosen = traffic.subjects()
    assert (chosen[subject], chosen.total()) == (10, ROWS)


def test_a_key_whose_requests_name_new_subjects_each_time_gets_a_tenth_of_a_round() -> None:
    traffic = Traffic()
    for number in range(1000):
        traffic.add(1, tenant="flooder", subject=f"s{number}")
    for number in range(400):
        traffic.add(1, tenant=f"tenant{number % 19}", subject=f"user{number}")
    tenants = Counter(traffic.rows[number].tenant for number in traffic.choose().chosen)
    assert (tenants["flooder"], tenants.total()) == (10, ROWS)
    explicit = RoundRule(most_rows=ROWS, tenant_share=0.05)
    assert Counter(traffic.rows[number].tenant for number in traffic.choose(explicit).chosen)["flooder"] == 5


def test_rows_of_one_tenant_without_a_subject_do_not_limit_those_of_another() -> None:
    traffic = honest(Traffic().add(50, tenant="a").add(50, tenant="b"))
    tenants = Counter(traffic.rows[number].tenant for number in traffic.choose().chosen)
    assert (tenants["a"], tenants["b"], tenants.total()) == (10, 10, ROWS)


def small_projects() -> Iterator[Traffic]:
    yield Traffic().add(ROWS)  # a tutorial: nobody names a subject
    yield Traffic().add(ROWS, subject="me")
    yield Traffic().add(ROWS - 3, subject="me").add(1, subject="a").add(1, subject="b").add(1)
    yield Traffic().add(70, tenant="shop").add(20, tenant="tests").add(10, tenant="admin")
    runs, groups = Traffic(), Traffic()
    for number in range(20):  # an agent with long runs, and a few short ones
        runs.add(20 if number % 3 else 2, task=f"run{number}")
    for number in range(26):  # groups of 8 runs with 4 calls each
        groups.add(32, task=f"group{number}", subject=f"user{number}")
    yield from (runs, groups)


@pytest.mark.parametrize("traffic", list(small_projects()))
def test_a_small_project_without_configured_limits_trains_on_all_its_rows(traffic: Traffic) -> None:
    choice = traffic.choose()
    assert (len(choice.above_share), choice.waiting) == (0, len(traffic.rows))


def test_configured_shares_hold_for_any_number_of_users() -> None:
    two = Traffic().add(200, subject="a").add(200, subject="b").add(200)
    assert two.subjects(RoundRule(most_rows=ROWS, subject_share=0.2)) == {"a": 20, "b": 20, None: 20}
    assert len(Traffic().add(ROWS).choose(RoundRule(most_rows=ROWS, subject_share=0.2)).chosen) == ROWS
    assert two.add(30, task="t").choose(RoundRule(most_rows=ROWS, task_share=0.2)).above_share == list(range(600, 630))
    unlimited = RoundRule(most_rows=ROWS, task_share=1, subject_share=1, tenant_share=1)
    assert honest(Traffic().add(ROWS, subject="flooder", task="t")).subjects(unlimited) == {"flooder": ROWS}


def test_a_share_of_a_small_round_is_at_least_one_row() -> None:
    assert len(honest(Traffic()).choose(RoundRule(most_rows=4, subject_share=0.01)).chosen) == 4


def test_the_choice_of_rows_takes_linear_time() -> None:
    def rows() -> Iterable[CommittedRow]:
        return (CommittedRow(n, f"{n % 30}", f"t{n}", f"m{n}", f"s{n}", 0) for n in range(20_000))

    before = time.process_time()
    assert len(choose_rows(rows(), RoundRule(most_rows=20_000, subject_share=0.1)).chosen) == 20_000
    assert time.process_time() - before < 2
