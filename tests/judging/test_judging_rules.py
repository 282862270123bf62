"""The rules: what counts as right, on hand-made cases and on every GSM8K reference answer."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.judging.judged_run import response_text
from rft_platform.judging.rules.mathematics import are_equal, final_number, gsm8k, numeric
from rft_platform.judging.rules.patterns import contains, exact_match, matches_format, within_length
from rft_platform.judging.rules.puzzles import countdown
from rft_platform.tasks.dataset import load_tasks


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It costs 5 dollars.\n#### 1,234", 1234),
        ("#### 3\nNo, wait.\n#### 4", 4),
        ("#### $1,000.50", Fraction("1000.5")),
        ("#### -$3", -3),
        ("#### $-3", -3),
        ("#### 5 + 2 = 7 apples", 7),
        ("A: 42", 42),
        ("A: 42\nQ: 1+1\nA: 2", 2),
        ("**Answer:** 18 eggs in 2 days", 18),
        ("The answer is 5. It took 2 days.", 5),
        (r"so \boxed{\frac{3}{4}} of 8", Fraction(3, 4)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        (r"\boxed{\frac12}", Fraction(1, 2)),
        (r"\boxed{\frac{1}2}", Fraction(1, 2)),
        (r"it is $\frac1{72}$.", Fraction(1, 72)),
        (r"\boxed{\dfrac 1 2}", Fraction(1, 2)),
        (r"\boxed{\cfrac{ 1 }{ 2 }}", Fraction(1, 2)),
        (r"\boxed{-\frac12}", Fraction(-1, 2)),
        (r"\boxed{\frac{-1}{2}}", Fraction(-1, 2)),
        (r"\boxed{\frac{1.0}{2.0}}", Fraction(1, 2)),
        (r"\boxed{\frac{1,000}{3}}", Fraction(1000, 3)),
        (r"\boxed{1\frac{1}{2}}", Fraction(3, 2)),
        (r"A: $-1 \frac12$ cups", Fraction(-3, 2)),
        (r"\boxed{2\frac{3}{2}}", None),  # neither a mixed number nor a number
        (r"\boxed{\frac{1}{0}}", None),
        (r"\boxed{\frac{\pi}{2}}", None),
        (r"\boxed{2\frac{\pi}{3}}", None),
        (r"\boxed{\frac{\sqrt{3}}{2}}", None),
        (r"\boxed{\frac123}", None),
        (r"\boxed{\frac{1}{2}", Fraction(1, 2)),
        (r"5 is the value of \frac{a}{b}", 5),
        (r"\frac{a}{2} = 7", 7),
        (r"first \boxed{1}, then \boxed{\text{about } 2}", 2),
        ("it is 3/4", Fraction(3, 4)),
        ("between 3-5", 5),
        ("8 - 3", 3),
        ("x=-5", -5),
        ("(−7)", -7),
        ("half is .5", Fraction(1, 2)),
        ("12%", 12),
        ("#### 72.", 72),
        ("1,2,3", 3),
        ("nothing", None),
        ("####\n72", 72),
        ("#### none of them", None),
        ("2/0", None),
        ("9" * 5000, None),
        ("1e3", 1000),
        ("about 1.5E-4", Fraction(3, 20000)),
        ("10^3", 1000),
        ("2 × 10^{3} m", 2000),
        ("2^10 is 10**3 + 24 = 2^{10}", 1024),
        ("x^3", None),
        ("5 m^2", 5),
        ("5 m^{-2}", 5),
        ("x_3 = 7", 7),
        ("**42**", 42),
        ("it is 1 000", 1000),
        ("#### 111 222 3", 111),  # a list
        ("#### 12\u202f345.5", Fraction("12345.5")),
        (r"$1\,000\,000$", 10**6),
        ("１２", 12),
        ("The answer is 7!", 7),
        ("9^99999", None),
        ("7" + " more" * 400, 7),
    ],
)
def test_final_number(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


@given(st.text(alphabet="0123456789,.$-/#= \\boxed{}frac\nAnswer:", max_size=60))
def test_final_number_takes_any_text(text: str) -> None:
    assert final_number(text) is None or isinstance(final_number(text), Fraction)


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["#### {}", "A: {}", r"\boxed{{{}}}", "so it is {}", "Answer: {} km"])
)
def test_final_number_reads_what_was_written(number: int, form: str) -> None:
    assert final_number(form.format(f"{number:,}")) == number


def test_numeric() -> None:
    assert numeric({"answer": "0.5"}, "A: 1/2") == 1.0
    assert numeric({"answer": 7}, "the answer is 7") == 1.0
    assert numeric({"answer": "7"}, "no idea") == 0.0
    assert numeric({"answer": "3.14"}, "3.1416", tolerance=0.01) == 1.0
    assert numeric({"result": "3"}, "3", answer_key="result") == 1.0
    with pytest.raises(ValueError, match="holds no number"):
        numeric({"answer": "blue"}, "3")
    with pytest.raises(KeyError, match="no column 'answer'; its columns are question"):
        numeric({"question": "1+1"}, "2")


def test_gsm8k_strict_requires_the_hashes() -> None:
    task = {"answer": "2+2=4\n#### 4"}
    assert gsm8k(task, "it is 4") == 1.0
    assert gsm8k(task, "it is 4", strict=True) == 0.0
    assert gsm8k(task, "it is\n#### 4", strict=True) == 1.0
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k({"answer": "4"}, "4")


def with_another_number(answer: str) -> str:
    reasoning, _, number = answer.rpartition("####")
    return f"{reasoning}#### {int(number.replace(',', '')) + 1}"


@pytest.mark.parametrize("strict", [False, True])
def test_gsm8k_on_every_reference_answer(test_data: Path, strict: bool) -> None:
    tasks = load_tasks(str(test_data / "data" / "gsm8k")).tasks
    right = [gsm8k(task.raw, task.answer, strict=strict) for task in tasks]
    wrong = [gsm8k(task.raw, with_another_number(task.answer or ""), strict=strict) for task in tasks]
    assert (len(tasks), sum(right), sum(wrong)) == (7473, 7473.0, 0.0)


def test_exact_match_and_contains() -> None:
    assert exact_match({"answer": "42"}, " 42\n") == 1.0
    assert exact_match({"answer": 42}, "42") == 1.0
    assert exact_match({"answer": "Yes"}, "yes") == 0.0
    assert exact_match({"answer": "Yes"}, "yes", ignore_case=True) == 1.0
    assert contains({"answer": "Paris"}, "It is paris.") == 1.0
    assert contains({"answer": "Paris"}, "It is paris.", ignore_case=False) == 0.0
    with pytest.raises(ValueError, match="is empty"):
        contains({"answer": " "}, "anything")


def test_format_and_length() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert matches_format({}, "<think>a\nb</think>\n<answer>1</answer>\n", pattern=pattern) == 1.0
    assert matches_format({}, "<answer>1</answer>", pattern=pattern) == 0.0
    assert within_length({}, "abcd", max_chars=4) == 1.0
    assert within_length({}, "abcde", max_chars=4) == 0.0
    assert within_length({}, "abcde", max_chars=4, margin_chars=2) == 0.5
    assert within_length({}, "a", min_chars=2, max_chars=4) == 0.0


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        (r"\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("x^2+2x", r"\boxed{x(x+2)}", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("steps\n#### 18", "so #### 18", 1.0),
        ("18", r"\boxed{19}", 0.0),
        (r"(1,2)", r"\boxed{[1,2]}", 0.0),
        ("18", "", 0.0),
    ],
)
def test_math(reference: str, response: str, reward: float) -> None:
    assert are_equal(reference.rpartition("####")[2].strip(), response) == reward


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("-5", "The answer is −5."),
        ("12", "１２"),
        ("1000", "1e3"),
        ("1000", "It is 1 000"),
        ("42", r"\boxed{\text{The answer is } 42}"),
        ("42", "A: 42 (see step 3)"),
        ("42", "Some steps, 7 in all. <answer>42</answer>"),
        ("10", r"The answer is \$10."),
        (r"2\sqrt{2}", r"So x = 2\sqrt{2}."),
        (r"\frac{1}{72}", r"The probability is \frac1{72}"),
        (r"\left(3,\frac{\pi}{2}\right)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("(1,2)", "(1, 2)"),
        ("18", "#### 18 eggs"),
        (r"\text{Monday}", r"\boxed{\text{Monday}}"),
        ("7", "The answer is 7!"),
        ("5", "5 m^2"),
    ],
)
def test_math_reads_answers_however_they_are_written(reference: str, response: str) -> None:
    assert are_equal(reference, response) is True
    assert are_equal("12345", response) is False


def test_what_is_no_expression_cannot_be_compared_with() -> None:
    assert are_equal("", "5") is None


def test_the_text_of_any_response() -> None:
    class Message:
        content = "hello"

    assert response_text(None) == ""
    assert response_text(Message()) == "hello"
    assert response_text({"role": "assistant", "content": "hello"}) == "hello"
    assert response_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    assert response_text(42) == "42"
    assert response_text({"role": "assistant", "content": None, "tool_calls": []}) == ""


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>4 * 6</think> <answer>(8 - 4) * 6 * 1</answer>", 1.0),
        ("<answer>1</answer> or <answer>6 * (8 - 4) / 1 = 24</answer>", 1.0),
        ("<answer>8 * (4 - 1)</answer>", 0.1),  # 6 is not used
        ("<answer>4 * 6 * 1</answer>", 0.1),  # 8 is not used
        ("<answer>8 + 4 + 6 + 1</answer>", 0.1),  # 19
        ("<answer>24</answer>", 0.1),
        ("<answer>6 / (4 - 4)</answer>", 0.1),
        ("<answer>8 ** 4 + 6 - 1</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("(8 - 4) * 6 * 1", 0.0),
    ],
)
def test_countdown_requires_each_number_once_and_the_target(response: str, reward: float) -> None:
    puzzle = {"target": 24, "numbers": [1, 4, 6, 8]}
    assert countdown({"answer": puzzle}, response) == reward
    assert countdown({"answer": str(puzzle)}, response) == reward
    assert countdown({"goal": puzzle}, response, answer_key="goal", form_reward=0) == float(reward == 1)


def test_countdown_names_the_column_without_a_puzzle() -> None:
    with pytest.raises(ValueError, match="column 'answer': expected target and numbers"):
        countdown({"answer": "24"}, "<answer>1</answer>")
