"""Email search: the mailbox, questions new in thread and wording, the judgement of calls, and a careless teacher."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.recipe_projects import modules_of

pytestmark = pytest.mark.timeout(300)  # writing a project takes seconds on a quiet core
corrections, demonstrations, mail, prepare, questions, workflow = modules_of(
    "email-search", "corrections", "demonstrations", "mail", "prepare", "questions", "workflow"
)
Mailbox, Question, Inquiry = mail.Mailbox, questions.Question, workflow.Inquiry
Split = tuple[list[Question], list[Question]]


@pytest.fixture(scope="module")
def mailbox() -> Mailbox:
    """The mailbox of the recipe."""
    return mail.mailbox_of(0)


@pytest.fixture(scope="module")
def split() -> Split:
    """Explored and held-out questions."""
    return questions.split_questions()


def inquire(mailbox: Mailbox, question: Question, *calls: tuple[str, object]) -> Inquiry:
    """The calls (name, arguments) of a run."""
    inquiry = Inquiry(mailbox, question.source)
    for name, arguments in calls:
        inquiry.call({"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)})
    return inquiry


def right_search(question: Question) -> tuple[str, object]:
    """The search that lists the question's source."""
    return "search", {"topic": question.source.topic, "month": question.source.month}


def test_a_search_with_topic_and_month_lists_the_thread(mailbox: Mailbox) -> None:
    assert len(mailbox.messages) > 2000
    for topic in mail.TOPICS:
        for month in mail.MONTHS:
            thread = mailbox.thread(topic, month)
            assert len(thread) == len({message.sender for message in thread}) == mail.THREAD
            assert sorted(message.id for message in mailbox.search(topic, month)) == sorted(each.id for each in thread)


def test_an_incomplete_search_lists_little_of_a_thread(mailbox: Mailbox) -> None:
    hits = [mailbox.search(topic) for topic in mail.TOPICS]
    assert all(len(found) == mail.HITS for found in hits)
    assert all(len({message.month for message in found}) >= 3 for found in hits)
    assert len(mailbox.search(month="may")) == mail.HITS
    with pytest.raises(ValueError, match="needs a topic or a month"):
        mailbox.search()


def test_no_text_is_a_search_operator(mailbox: Mailbox) -> None:
    generator = random.Random(1)
    for _ in range(500):
        text = "".join(generator.choice('budget*"():^-+NEAR OR{}\\\0é\n') for _ in range(generator.randint(0, 12)))
        try:
            mailbox.search(text, generator.choice((text, "may")))
        except ValueError as error:
            assert "needs a topic or a month" in str(error)


def test_equal_seeds_give_equal_mailboxes_and_other_seeds_others() -> None:
    assert Mailbox(0).messages == mail.mailbox_of(0).messages
    assert Mailbox(1).messages != mail.mailbox_of(0).messages


def test_a_held_out_question_is_new_in_thread_and_wording(split: Split) -> None:
    explored, held_out = split
    assert len({question.text for question in held_out}) == len(held_out) == questions.HELD_OUT
    assert not {question.template for question in explored} & {question.template for question in held_out}
    threads = [{(each.source.topic, each.source.month) for each in side} for side in split]
    assert not threads[0] & threads[1]
    assert {question.when for question in held_out} == {question.when for question in explored}


def test_other_held_out_seeds_give_other_questions_of_the_same_kind(
    split: Split,
) -> None:
    again, other = questions.split_questions(held_out_seed=1)
    assert again == split[0]
    assert len({each.text for each in split[1]} & {each.text for each in other}) < questions.HELD_OUT / 2


def test_a_run_without_error_has_reward_one(mailbox: Mailbox, split: Split) -> None:
    for question in split[0][:50]:
        inquiry = inquire(mailbox, question, right_search(question), ("read", {"id": question.source.id}))
        assert inquiry.reward(question.answer) == pytest.approx(1.0)
        assert inquiry.reward("wrong") == pytest.approx(2.5 / 3.5)
        metrics = inquiry.metrics(question.answer)
        assert metrics["tool_accuracy"] == metrics["argument_accuracy"] == metrics["answered"] == 1.0
        assert metrics["sources_found"] == mail.THREAD and metrics["calls"] == 2.0
        assert inquiry.calls[1].text.endswith(f" is {question.answer}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("open", {"id": 1}),
        ("search", {}),
        ("search", {"topic": 3}),
        ("search", {"word": "budget"}),
        ("search", "no json"),
        ("search", "[1]"),
        ("read", {"id": 1}),
        ("read", {"id": [1]}),
        ("read", {"id": "1"}),
        ("read", {}),
    ],
)
def test_an_invalid_call_is_penalised_and_explained_to_the_model(
    mailbox: Mailbox, split: Split, name: str, arguments: object
) -> None:
    inquiry = inquire(mailbox, split[0][0], (name, arguments))
    assert inquiry.reward("") == pytest.approx(-2 / 3.5)
    assert inquiry.calls[0].text.startswith("error: ")
    assert inquiry.metrics("")["invalid_calls"] == 1.0


def test_more_calls_than_needed_raise_no_reward(mailbox: Mailbox, split: Split) -> None:
    question = split[0][0]
    search, read = right_search(question), ("read", {"id": question.source.id})
    rewards = [
        inquire(mailbox, question, *calls).reward(question.answer)
        for calls in ((search, read), (search, search, read), (search, search, search, read), (search, read, read))
    ]
    assert rewards == sorted(rewards, reverse=True)[:1] + rewards[1:] and rewards[1] > rewards[2]
    assert inquire(mailbox, question).reward(question.answer) < 0, "an answer without a search is a guess"


def test_reading_is_right_only_after_a_search_that_lists_the_message(mailbox: Mailbox, split: Split) -> None:
    question = split[0][0]
    read = ("read", {"id": question.source.id})
    early = inquire(mailbox, question, read, right_search(question))
    assert [call.right_tool for call in early.calls] == [False, True]
    other = next(month for month in mail.MONTHS if month != question.source.month)
    twice = inquire(
        mailbox, question, ("search", {"topic": question.source.topic, "month": other}), right_search(question), read
    )
    assert [call.right_tool for call in twice.calls] == [True, True, True]
    assert [call.right_arguments for call in twice.calls] == [False, True, True]


def test_the_teacher_has_the_error_rate_of_the_recipe(mailbox: Mailbox, split: Split) -> None:
    generator, metrics = random.Random(5), []
    for question in split[0][:2000]:
        inquiry = Inquiry(mailbox, question.source)
        conversation = demonstrations.demonstrate(question, generator, inquiry)
        assert conversation[0]["content"] == question.text and conversation[-1]["role"] == "assistant"
        assert sum("tool_calls" in message for message in conversation) == len(inquiry.calls)
        metrics.append(inquiry.metrics(conversation[-1]["content"]))
    assert 0.72 < fmean(each["tool_accuracy"] for each in metrics) < 0.82
    assert 0.45 < fmean(each["argument_accuracy"] for each in metrics) < 0.55
    assert 3.3 < fmean(each["sources_found"] for each in metrics) < 4.0
    assert 0.04 < fmean(each["invalid_calls"] for each in metrics) < 0.12


def test_a_correction_is_right_and_begins_with_what_the_teacher_did(mailbox: Mailbox) -> None:
    generator, kinds = random.Random(5), set()
    for question in questions.explored_questions(0, 60, seed=7):
        messages = demonstrations.demonstrate(question, generator, Inquiry(mailbox, question.source))
        for before, chosen, rejected in corrections.corrections(messages, question, Inquiry(mailbox, question.source)):
            assert messages[: len(before) + 1] == [*before, rejected] and chosen != rejected
            inquiry = Inquiry(mailbox, question.source)
            for call in (call for message in before for call in message.get("tool_calls", ())):
                inquiry.call(call["function"])
            if "content" in chosen:
                assert chosen["content"] == question.answer and inquiry.is_read
                continue
            (call,) = chosen["tool_calls"]
            result = inquiry.call(call["function"])
            assert result.valid and result.right_tool and result.right_arguments
            kinds.add(call["function"]["name"])
    assert kinds == {"search", "read"}


def test_demonstrations_are_of_other_mailboxes_than_the_tasks(split: Split) -> None:
    assert 0 not in demonstrations.MAILBOXES
    ids = {question.source.id for question in split[0] + split[1]}
    for number in list(demonstrations.MAILBOXES)[:3]:
        others = {question.source.id for question in questions.explored_questions(number, 200)}
        assert len(ids & others) < 0.1 * len(others)


@pytest.mark.slow
def test_the_mailbox_needs_few_tokens(project: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project("email-search") / "model")
    assert len(tokenizer) == prepare.VOCABULARY
    for word in (*mail.TOPICS, *mail.PEOPLE, *mail.MONTHS):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1, word
