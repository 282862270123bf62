"""Findings: what they are about, and how errors become a refusal."""

import pytest

from rft_platform.common.errors import RftError, UserError
from rft_platform.config.findings import error, has_errors, note, raised, refuse, warning


def test_a_finding_is_about_the_first_word_of_its_text_or_about_a_given_key() -> None:
    assert error("trainer.nproc 4: this machine has 2 processors").key == "trainer.nproc"
    assert warning("trainer.x: ignored").key == "trainer.x"
    assert note("3 can be read", key="database").key == "database"
    assert str(note("3 can be read", key="database")) == "3 can be read"


def test_only_errors_refuse_each_once() -> None:
    refuse([warning("a: no effect"), note("b: a fact")])
    with pytest.raises(UserError) as caught:
        refuse([error("a: wrong"), warning("b: no effect"), error("a: wrong"), error("c: wrong")])
    assert str(caught.value) == "a: wrong\nc: wrong"
    assert has_errors([note("b: a fact"), error("a: wrong")]) and not has_errors([warning("b: no effect")])


def test_an_error_of_another_class_is_not_a_finding() -> None:
    def check(problem: Exception | None) -> None:
        if problem is not None:
            raise problem

    assert [finding.text for finding in raised(check, UserError("x: wrong"))] == ["x: wrong"]
    assert list(raised(check, None)) == []
    with pytest.raises(RftError, match="damaged"):
        list(raised(check, RftError("damaged")))
    assert [finding.key for finding in raised(check, RftError("damaged"), key="project", kind=RftError)] == ["project"]
