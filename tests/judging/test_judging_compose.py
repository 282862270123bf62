"""Building judges: names, signatures, weights, versions."""

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.common.errors import UserError
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.judging.execution.compose import MODEL_JUDGES, RULES, build_judge, find_judge
from rft_platform.judging.execution.judge_version import used_source
from rft_platform.judging.types import check_judge_function


def judge_with_everything(task: Any, response: Any, auxiliary_models: Any = None, logger: Any = None) -> float:
    return 1.0


def test_judges_are_found_by_name_and_by_import() -> None:
    assert find_judge("gsm8k") is RULES["gsm8k"]
    assert find_judge("rft_platform.judging.rules.mathematics:numeric") is RULES["numeric"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ("zzz", "known are exact_match, numeric"),
        ("no.such.module:judge", "cannot import no.such.module"),
        ("rft_platform.judging.judged_run:absent", "has no 'absent'"),
        ("rft_platform.judging.execution.judge_rollouts:JUDGE_ERROR", "expected a function, got a str"),
    ],
)
def test_unknown_judges(name: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        find_judge(name)


def test_signatures_are_checked_by_name() -> None:
    def needs_response(task: Any) -> float:
        return 1.0

    def variadic(task: Any, response: Any, *args: Any, **kwargs: Any) -> float:
        return 1.0

    def extra(task: Any, response: Any, threshold: float = 0.5) -> float:
        return threshold

    check_judge_function(judge_with_everything)
    check_judge_function(extra, extra=["threshold"])
    with pytest.raises(ValueError, match=r"Missing essential parameters: \['response'\]"):
        check_judge_function(needs_response)
    with pytest.raises(ValueError, match=r"Should not use \*args or \*\*kwargs"):
        check_judge_function(variadic)
    with pytest.raises(ValueError, match=r"Contains disallowed parameters: \['threshold'\]"):
        check_judge_function(extra)
    with pytest.raises(ValueError, match=r"no parameters for the given arguments: \['level'\]"):
        check_judge_function(judge_with_everything, extra=["level"])


def test_arguments_are_checked() -> None:
    with pytest.raises(UserError, match="judge 'format' needs the arguments pattern; got none"):
        build_judge("format")
    with pytest.raises(UserError, match="did you mean 'tolerance'"):
        build_judge("numeric", {"tolerence": 1})
    with pytest.raises(UserError, match=r"format\.response_key is null"):
        build_judge("exact_match", answer_key=None)
    with pytest.raises(UserError, match="no parameters for"):
        build_judge(judge_with_everything, {"level": 1})
    with pytest.raises(UserError, match="give each entry its own args"):
        build_judge([WeightedJudge(judge="numeric")], {"tolerance": 1})
    with pytest.raises(UserError, match="the list is empty"):
        build_judge([])


@pytest.mark.parametrize(
    ("rule", "args"),
    [
        ("tags", {"tags": "answer"}),
        ("exact_match", {"ignore_case": "false"}),
        ("numeric", {"tolerance": "1 %"}),
        ("regex", {"pattern": 5}),
    ],
)
def test_values_of_arguments_are_checked(rule: str, args: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"argument '{next(iter(args))}' of judge '{rule}' is .*: input should be"):
        build_judge(rule, args)


def test_the_answer_column_reaches_the_rules_that_compare() -> None:
    spec = build_judge(
        [WeightedJudge(judge="numeric"), WeightedJudge(judge="length", args={"max_chars": 9})], answer_key="y"
    )
    assert [dict(part.args) for part in spec.parts] == [{"answer_key": "y"}, {"max_chars": 9}]
    assert dict(build_judge("numeric", {"answer_key": "z"}, answer_key="y").parts[0].args) == {"answer_key": "z"}


def test_parts_have_distinct_names() -> None:
    spec = build_judge([WeightedJudge(judge="numeric"), WeightedJudge(judge="numeric", args={"tolerance": 0.1})])
    assert [part.name for part in spec.parts] == ["numeric", "numeric#2"]


def test_the_version_covers_name_arguments_and_weights() -> None:
    def entry(weight: float = 1.0, **args: Any) -> WeightedJudge:
        return WeightedJudge(judge="numeric", weight=weight, args=args)

    versions = [
        build_judge("numeric").version,
        build_judge("gsm8k").version,
        build_judge("numeric", {"tolerance": 0.1}).version,
        build_judge([entry(weight=2)]).version,
        build_judge([entry(), entry()]).version,
        build_judge("numeric", answer_key="y").version,
    ]
    assert len(set(versions)) == len(versions)
    assert build_judge("numeric").version == build_judge([entry()]).version == versions[0]
    assert len(versions[0]) == 16


SOURCE = """
import re
LIMIT = 0.5
PATTERN = re.compile("x")

def helper(text):
    return len(text) > LIMIT

def judge(task, response):
    return float(helper(response) and bool(PATTERN.search(response)))

def unrelated():
    return 1
"""


@pytest.fixture
def version_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Version of ``judge`` in a module with the given source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 0

    def version(source: str) -> str:
        nonlocal count
        count += 1  # a new folder each time: Python caches sources by path
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "my_judges.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("my_judges", None)
        importlib.invalidate_caches()
        try:
            return build_judge("my_judges:judge").version
        finally:
            sys.modules.pop("my_judges", None)

    return version


def test_changed_code_is_a_changed_version(version_of: Any) -> None:
    original = version_of(SOURCE)
    assert version_of(SOURCE) == original
    assert version_of(SOURCE.replace("return 1", "return 2")) == original
    assert version_of(SOURCE.replace("bool(", "not bool(")) != original
    assert version_of(SOURCE.replace("len(text) > LIMIT", "len(text) >= LIMIT")) != original
    assert version_of(SOURCE.replace("LIMIT = 0.5", "LIMIT = 0.6")) != original
    assert version_of(SOURCE.replace('compile("x")', 'compile("y")')) != original


def test_closures_and_callable_objects_have_versions() -> None:
    def make(threshold: float) -> Any:
        def judge(task: Any, response: Any) -> float:
            return float(len(response) > threshold)

        return judge

    class Judge:
        def __init__(self, threshold: float) -> None:
            self.threshold = threshold

        def __call__(self, task: Any, response: Any) -> float:
            return float(len(response) > self.threshold)

    for kind in (make, Judge):
        assert build_judge(kind(1)).version == build_judge(kind(1)).version
        assert build_judge(kind(1)).version != build_judge(kind(2)).version


def test_the_documentation_names_every_judge_and_its_arguments() -> None:
    text = (Path(__file__).parents[2] / "docs" / "judges.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.MULTILINE))
    shared = {"answer_key", "correct_tool", "correct_args", "tool_success", "invalid_tool", "unneeded_tool"}
    for name, rule in RULES.items():
        assert name in rows, f"{name}: no row in docs/judges.md"
        for argument, parameter in inspect.signature(rule).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and argument not in shared:
                assert f"`{argument}" in rows[name], f"{name}: {argument}"
    for name, kind in MODEL_JUDGES.items():
        for argument in kind.model_fields:
            assert re.search(rf"`?{argument}\b", text), f"{name}: {argument}"


def test_the_judges_of_the_documentation_are_built() -> None:
    text = (Path(__file__).parents[2] / "docs" / "judges.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    lists = [block["judge"] for block in blocks if isinstance(block.get("judge"), list)]
    tasksets = [block["buffer"]["explorer_input"]["taskset"] for block in blocks if "buffer" in block]
    assert len(lists) == 1 and len(tasksets) == 2
    assert len(build_judge([WeightedJudge.model_validate(entry) for entry in lists[0]]).parts) == 4
    for taskset in tasksets:
        assert build_judge(taskset["judge"], taskset["judge_args"]).version


class Client:
    """Something that is no plain value."""


class Threshold:
    """A judge with a state."""

    def __init__(self, threshold: float, **more: Any) -> None:
        self.client, self.threshold = Client(), threshold
        self.__dict__ |= more

    def __call__(self, task: dict[str, Any], response: Any) -> float:
        return float(len(response) > self.threshold)

    def method(self, task: dict[str, Any], response: Any) -> float:
        return self(task, response)

    def helped(self, task: dict[str, Any], response: Any) -> float:
        return self._over(len(response))

    def _over(self, length: int) -> float:
        return float(length > _scaled(self.threshold))


def _scaled(threshold: int) -> int:
    return threshold * 2


def above(threshold: float, task: dict[str, Any], response: Any) -> float:
    return float(len(response) > threshold)


def test_the_version_depends_on_the_state_of_objects_and_on_bound_arguments() -> None:
    def version(judge: Any) -> str:
        return build_judge(judge).version

    partial = functools.partial
    for same, other in (
        (Threshold(1), Threshold(99)),
        (Threshold(1).method, Threshold(99).method),
        (Threshold(1, words=[Client(), {"a": 1}]), Threshold(1, words=[Client(), {"a": 2}])),
        (Threshold(1, client=Client()), Threshold(1, client=Threshold(1))),
        (Threshold(1, rule=above), Threshold(1, rule=contains_nothing)),
        (partial(above, 1), partial(above, 99)),
        (partial(partial(above), 1), partial(above, 2)),
        (partial(above, Client()), partial(above, Threshold(1))),
    ):
        assert version(same) == version(same) != version(other)
    assert used_source(functools.update_wrapper(partial(above, 1), above)) != used_source(above)
    assert f"{__name__}._scaled" in used_source(Threshold(1)), "another method of the class uses it"
    assert version(Threshold(1)) == version(Threshold(1)), "not by where it lies in memory"
    assert version(partial(above, Client())) == version(partial(above, Client()))


def contains_nothing(task: dict[str, Any], response: Any) -> float:
    return float(not response)
