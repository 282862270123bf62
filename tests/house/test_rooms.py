"""The rooms of the architecture: imports point downward in its table, and every room stands in it."""

import ast
import re
from pathlib import Path

import rft_platform

PACKAGE = Path(rft_platform.__file__).parent
TABLE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d+|ground) \| (`[^|]+`) \|", re.MULTILINE)
ENTRIES = {"__init__", "__main__"}


def levels() -> dict[str, int]:
    """Level of each room, the ground being -1."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    return {
        room.removesuffix(".py"): -1 if level == "ground" else int(level)
        for level, rooms in rows
        for room in re.findall(r"`([^`]+)`", rooms)
    }


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> set[str]:
    """Rooms that ``file`` imports, inside functions too; what is imported for type checkers only does not count."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    names = [
        name
        for node in ast.walk(tree)
        if id(node) not in skipped
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    return {name.split(".")[1] for name in names if name.startswith("rft_platform.")}


def test_every_room_stands_in_the_table() -> None:
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")} - ENTRIES
    assert rooms == set(levels())


def test_imports_point_downward() -> None:
    level = levels()
    upward = sorted(
        {
            f"{room_of(file)} (level {level[room_of(file)]}) imports {other} (level {level[other]}): {file.name}"
            for file in PACKAGE.rglob("*.py")
            if room_of(file) not in ENTRIES
            for other in imported_rooms(file)
            if level[other] > level[room_of(file)]
        }
    )
    assert not upward, "\n".join(upward)
