"""Email search: the mailbox, questions new in sender and month, the judgement of calls, and a careless teacher."""

import json
import random
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from rft_platform.judging.judged_run import JudgedRun, ToolCall
from rft_platform.judging.rules.tool_use import tool_use
from rft_platform.recipes.recipe import PROJECTS
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


def expert(mailbox: Mailbox, question: Question) -> list[tuple[str, object]]:
    """The search that lists the question's source, and the read of its handle."""
    return [(call["name"], call["arguments"]) for call in workflow.right_calls(mailbox, question.source)]


def test_a_search_with_topic_and_month_lists_the_thread(mailbox: Mailbox) -> None:
    assert len(mailbox.messages) > 5000
    for topic in mail.TOPICS:
        for month in mail.MONTHS:
            thread = mailbox.thread(topic, month)
            assert len(thread) == len({message.sender for message in thread}) == mail.THREAD
            assert {id(message) for message in mailbox.search(topic, month)} == {id(message) for message in thread}


def test_an_incomplete_search_lists_little_of_a_thread(mailbox: Mailbox) -> None:
    hits = [mailbox.search(topic) for topic in mail.TOPICS]
    assert all(len(found) == mail.HITS for found in hits)
    assert all(len({message.month for message in found}) >= 3 for found in hits)
    assert len(mailbox.search(month="May 22")) == mail.HITS
    with pytest.raises(ValueError, match="needs a topic or a month"):
        mailbox.search()


def test_the_mailbox_holds_near_duplicates(mailbox: Mailbox) -> None:
    copies = [message for message in mailbox.messages if message.subject == "fwd"]
    assert len(copies) > 300
    for copy in copies[:50]:
        topic, detail = copy.text.split()[2:4]
        thread = mailbox.thread(topic, copy.month)
        assert any((each.sender, each.detail) == (copy.sender, detail) for each in thread)


def test_no_text_is_a_search_operator(mailbox: Mailbox) -> None:
    generator = random.Random(1)
    for _ in range(500):
        text = "".join(generator.choice('budget*"():^-+NEAR OR{}\\\0é\n') for _ in range(generator.randint(0, 12)))
        try:
            mailbox.search(text, generator.choice((text, "May 22")))
        except ValueError as error:
            assert "needs a topic or a month" in str(error)


def test_equal_seeds_give_equal_mailboxes_and_other_seeds_others() -> None:
    assert Mailbox(0).messages == mail.mailbox_of(0).messages
    assert Mailbox(1).messages != mail.mailbox_of(0).messages


def test_no_training_asks_about_a_held_out_sender_or_month(split: Split) -> None:
    explored, held_out = split
    others = [each for number in demonstrations.MAILBOXES for each in questions.explored_questions(number, 300)]
    asked = [*explored, *others]
    assert len({question.text for question in held_out}) == len(held_out) == questions.HELD_OUT
    assert {each.source.sender for each in held_out} == questions.HELD_OUT_PEOPLE
    assert {each.source.month for each in held_out} == questions.HELD_OUT_MONTHS
    assert not {each.source.sender for each in asked} & questions.HELD_OUT_PEOPLE
    assert not {each.source.month for each in asked} & questions.HELD_OUT_MONTHS
    assert {question.when for question in held_out} == {question.when for question in explored} == set(questions.WHENS)
    for parts in (0, 1):  # the name of a month and its year are known, their combination is new
        known = {month.split()[parts] for month in mail.MONTHS if month not in questions.HELD_OUT_MONTHS}
        assert {month.split()[parts] for month in questions.HELD_OUT_MONTHS} <= known


def test_other_held_out_seeds_give_other_questions_of_the_same_kind(split: Split) -> None:
    again, other = questions.split_questions(held_out_seed=1)
    assert again == split[0]
    assert len({each.text for each in split[1]} & {each.text for each in other}) < questions.HELD_OUT / 2


def test_a_question_names_sender_topic_and_month_of_its_source(mailbox: Mailbox, split: Split) -> None:
    for question in (*split[0][:300], *split[1]):
        source = question.source
        assert f" {source.sender} " in question.text.replace("?", " ") and source.topic in question.text
        place = mail.MONTHS.index(source.month)
        named = {
            "name": source.month,
            "number": f"{place % 12 + 1}/{source.month[-2:]}",
            "after": f"after {mail.MONTHS[place - 1]}",
        }
        assert named[question.when] in question.text


def test_a_run_without_error_is_right_in_every_figure(mailbox: Mailbox, split: Split) -> None:
    for question in split[0][:50]:
        inquiry = inquire(mailbox, question, *expert(mailbox, question))
        metrics = inquiry.metrics(question.answer)
        assert metrics["tool_accuracy"] == metrics["argument_accuracy"] == metrics["answered"] == 1.0
        assert metrics["messages_found"] == mail.THREAD and metrics["calls"] == 2.0
        assert inquiry.calls[1].text.endswith(f" is {question.answer}")
        assert inquiry.metrics("wrong")["answered"] == 0.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("open", {"hit": "a"}),
        ("search", {}),
        ("search", {"topic": 3}),
        ("search", {"word": "budget"}),
        ("search", "no json"),
        ("search", "[1]"),
        ("read", {"hit": 1}),
        ("read", {"hit": ["a"]}),
        ("read", {"hit": ""}),
        ("read", {"hit": "a"}),
        ("read", {}),
    ],
)
def test_an_invalid_call_is_counted_and_explained_to_the_model(
    mailbox: Mailbox, split: Split, name: str, arguments: object
) -> None:
    inquiry = inquire(mailbox, split[0][0], (name, arguments))
    assert inquiry.calls[0].text.startswith("error: ")
    assert inquiry.metrics("")["invalid_calls"] == 1.0


def test_the_judges_reward_the_expert_most(mailbox: Mailbox, split: Split) -> None:
    question = split[0][0]
    search, read = expert(mailbox, question)
    incomplete = ("search", {"topic": question.source.topic})
    runs = [
        (search, read),
        (search, search, read),
        (incomplete, ("read", {"hit": "a"})),
        (("open", {}), ("open", {})),
    ]
    rewards = [judged(mailbox, question, calls) for calls in runs]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == len(rewards)
    assert rewards[0] == pytest.approx(2.5) and rewards[-1] <= -2.0


def judged(mailbox: Mailbox, question: Question, calls: Iterable[tuple[str, object]]) -> float:
    """The reward of the judge ``tool_use`` as ``rft.yaml`` configures it."""
    config = yaml.safe_load((PROJECTS / "email-search" / "rft.yaml").read_text())
    (judge, _) = config["buffer"]["explorer_input"]["taskset"]["judge"]
    done = inquire(mailbox, question, *calls)
    made = tuple(
        ToolCall(name, arguments, result.text, step)
        for step, ((name, arguments), result) in enumerate(zip(calls, done.calls, strict=True))
    )
    run = JudgedRun("run", "task", (), (), made, tuple(workflow.TOOLS))
    return tool_use(prepare.task(question), "", run, **judge["args"]).reward


def test_reading_is_right_only_after_a_search_that_lists_the_message(mailbox: Mailbox, split: Split) -> None:
    question = split[0][0]
    search, read = expert(mailbox, question)
    early = inquire(mailbox, question, read, search)
    assert [call.right_tool for call in early.calls] == [False, True]
    other = next(month for month in mail.MONTHS if month != question.source.month)
    twice = inquire(mailbox, question, ("search", {"topic": question.source.topic, "month": other}), search, read, read)
    assert [call.right_tool for call in twice.calls] == [True, True, True, False]
    assert [call.right_arguments for call in twice.calls] == [False, True, True, True]


def test_the_teacher_has_the_error_rate_of_the_recipe(mailbox: Mailbox, split: Split) -> None:
    generator, metrics = random.Random(5), []
    for question in split[0][:2000]:
        inquiry = Inquiry(mailbox, question.source)
        conversation = demonstrations.demonstrate(question, generator, inquiry)
        assert conversation[0]["content"] == question.text and conversation[-1]["role"] == "assistant"
        assert sum("tool_calls" in message for message in conversation) == len(inquiry.calls)
        metrics.append(inquiry.metrics(""))
    assert 0.55 < fmean(each["tool_accuracy"] for each in metrics) < 0.65
    assert 0.40 < fmean(each["argument_accuracy"] for each in metrics) < 0.50
    assert 2.9 < fmean(each["messages_found"] for each in metrics) < 3.5


def test_the_teacher_never_errs_in_the_handle_of_a_listed_sender(split: Split) -> None:
    generator = random.Random(6)
    for question in split[0][:300]:
        inquiry = Inquiry(mail.mailbox_of(0), question.source)
        again = Inquiry(mail.mailbox_of(0), question.source)
        for message in demonstrations.demonstrate(question, generator, inquiry):
            for call in message.get("tool_calls", ()):
                senders = [hit.sender for hit in again.hits]
                if call["function"]["name"] == "read" and question.source.sender in senders:
                    hit = json.loads(call["function"]["arguments"])["hit"]
                    assert senders[workflow.HANDLES.index(hit)] == question.source.sender
                again.call(call["function"])


def handles_of(listed: dict[str, str]) -> dict[str, str]:
    """The handle of each sender in a list."""
    lines = [line.split() for line in listed["content"].splitlines()]
    assert sorted(line[2] for line in lines) == list(workflow.HANDLES)
    return {line[1]: line[2] for line in lines}


def test_a_roll_call_has_all_senders_and_asks_for_none() -> None:
    orders = set()
    for asked, listed, answer in demonstrations.roll_calls(300):
        words = answer["content"].split()
        named = dict(zip(words[1::3], words[2::3], strict=True))
        assert asked["content"] == "Who wrote?" and named == handles_of(listed)
        orders.add(tuple(named.values()))
    assert len(orders) > 200  # the handles are shuffled


def test_a_correction_is_right_and_begins_with_what_the_teacher_did(mailbox: Mailbox) -> None:
    generator, kinds = random.Random(5), set()
    for question in questions.explored_questions(0, 60, seed=7):
        messages = demonstrations.demonstrate(question, generator, Inquiry(mailbox, question.source))
        inquiry = Inquiry(mailbox, question.source)
        for before, chosen, rejected in corrections.corrections(messages, question, inquiry, generator):
            assert messages[: len(before)] == before and chosen != rejected
            inquiry = Inquiry(mailbox, question.source)
            for call in (call for message in before for call in message.get("tool_calls", ())):
                inquiry.call(call["function"])
            if "tool_calls" not in chosen:
                assert chosen["content"] == question.source.text and inquiry.is_read and rejected["tool_calls"]
                kinds.add("answer")
                continue
            assert rejected == messages[len(before)]
            (call,) = chosen["tool_calls"]
            named = (chosen.get("content") or "").split()  # from SENDER HANDLE
            assert not named or (named[1], named[2]) in zip(
                [hit.sender for hit in inquiry.hits], workflow.HANDLES, strict=False
            )
            result = inquiry.call(call["function"])
            assert result.valid and result.right_tool and result.right_arguments
            kinds.add(call["function"]["name"])
    assert kinds == {"search", "read", "answer"}


def test_pairs_prefer_answers_and_calls(mailbox: Mailbox) -> None:
    """An agent that learns only that calls are better than answers never answers."""
    pairs = list(islice(corrections.pairs(), 600))
    chosen = [("tool_calls" in chosen, "tool_calls" in rejected) for _, chosen, rejected in pairs]
    assert chosen.count((False, True)) > 2 * chosen.count((True, False)) > 0


def test_demonstrations_are_of_other_mailboxes_than_the_tasks() -> None:
    assert 0 not in demonstrations.MAILBOXES


@pytest.mark.slow
def test_the_mailbox_needs_few_tokens(project: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project("email-search") / "model")
    assert len(tokenizer) == prepare.VOCABULARY
    words = [
        *mail.TOPICS,
        *mail.MONTH_NAMES,
        *(f" {word}" for word in (*mail.TOPICS, *mail.PEOPLE, *mail.MONTH_NAMES, *workflow.HANDLES)),
    ]
    for word in words:
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1, word
