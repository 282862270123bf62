"""Stages pass on the typed record of a round: one module knows the notes that it is stored in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rft_platform
from rft_platform.rounds.project import record

PACKAGE = Path(rft_platform.__file__).parent
#: The module of the record, and the class below it that reads and writes any JSON document of a round's folder.
ALLOWED = {Path(record.__file__), PACKAGE / "experience" / "notes.py"}
RAW = {"read_note", "write_note", "has_note", "withdraw_note", "notes"}
#: ``withdraw_note`` is called with the names that the record gives.
WITHDRAWS = PACKAGE / "experience" / "store.py"
NAMES = "|".join(["snapshot", *record._NOTES.values()])
NOTE_FILE = re.compile(rf"\b({NAMES})(-[a-z0-9_-]+)?\.json$")


def violations(source: str) -> Iterator[str]:
    """Calls of raw note functions, and file names of notes in strings that are no docstrings."""
    tree = ast.parse(source)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(node.value) for node in documented if isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RAW:
            yield f"line {node.lineno}: {node.func.attr}"
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if NOTE_FILE.search(text) and id(node) not in docstrings:
            yield f"line {node.lineno}: {text}"


def test_one_module_reads_and_writes_the_notes_of_a_round() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}, {each}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file not in ALLOWED
        for each in violations(file.read_text(encoding="utf-8"))
        if not (file == WITHDRAWS and each.endswith("withdraw_note"))
    ]
    assert not found, "read and write the parts of rounds/project/record.py instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        'store.read_note(1, "judge")["sound"]',
        'project.store.write_note(1, kind, {"rows": 4})',
        'store.has_note(number, "evaluation")',
        'folder / "evaluation.json"',
        'home.rounds / "r0001/train-policy.json"',
        'f"{folder}/policy-rival.json"',
    ],
)
def test_a_planted_violation_is_found(planted: str) -> None:
    assert list(violations(f"def stage(store):\n    return {planted}\n"))
