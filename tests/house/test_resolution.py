"""Settings are resolved in one place: nothing else merges presets with keys or reads what goes into batch sizes."""

import re
from pathlib import Path

import rft_platform

PACKAGE = Path(rft_platform.__file__).parent
#: The checks that name what the user wrote.
WRITTEN = {"config/checks/settings.py", "config/checks/batches.py", "config/checks/notices.py"}
#: What only the resolution may read; the checks may read what the user wrote, to name it in a message.
RESOLVED = {
    r"\balgorithm\.repeat_times\b|\bsettings\.repeat_times\b": {"config/resolve.py"},
    r"\bbuffer\.batch_size\b": {"config/resolve.py", "config/checks/batches.py", "config/dry_run.py"},
    r"\bbuffer\.train_batch_size\b": {"config/resolve.py", "config/dry_run.py", *WRITTEN},
    r"\bbuffer\.total_epochs\b": {"config/resolve.py", "config/dry_run.py", "rounds/offline.py"},
    r"\bgradient_accumulation_steps\b": {"config/resolve.py", "config/schema/trainer.py", *WRITTEN},
    r"(?<![\w.])preset\(|\bPRESETS\b": {"algorithms/presets.py"},
}


#: What may read the key ``online``: the configuration, the service, the checks before a start, and the definitions.
READS_ONLINE = ("config/", "online/", "run/", "component.py", "project_definitions.py", "rounds/project/project.py")


def code_of(file: Path) -> str:
    """The file without strings and comments, in which keys are named for people."""
    text = re.sub(r'"""[\s\S]*?"""', '""', file.read_text(encoding="utf-8"))
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"#.*", "", text)


def test_only_the_resolution_reads_what_it_resolves() -> None:
    code = {file.relative_to(PACKAGE).as_posix(): code_of(file) for file in PACKAGE.rglob("*.py")}
    found = [
        f"{name}: {match.group()}"
        for pattern, allowed in RESOLVED.items()
        for name, text in code.items()
        if name not in allowed
        for match in [re.search(pattern, text)]
        if match
    ]
    assert not found, "\n".join(found)
    for pattern, allowed in RESOLVED.items():  # a name that no longer matches would let everything pass
        assert re.search(pattern, "".join(code[name] for name in allowed)), pattern


def test_rounds_and_commands_use_the_traffic_source_of_a_project() -> None:
    """``project.traffic`` says whether a project is online; only some files read the key itself."""
    key = re.compile(r"\b(?:config|self)\.online\b")
    users = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if key.search(code_of(file))}
    assert sorted(name for name in users if not name.startswith(READS_ONLINE)) == []
    assert all(any(name.startswith(allowed) for name in users) for allowed in READS_ONLINE)
