"""A task folder of Harbor: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and ``solution/``.

Only folders that need no container can be read: those without a Dockerfile, or whose Dockerfile copies files and sets
variables. In the sandbox a task has a folder instead of a file system, so paths of the container below ``ROOTS`` are
translated in scripts, commands and variables, and back in what a command prints.
"""

import json
import math
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

#: Folders of Harbor's containers; a task's own working folder is one more.
ROOTS = ("/app", "/tests", "/logs", "/solution")
#: Instructions of a Dockerfile that change nothing here.
_IDLE = {"FROM", "ARG", "LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL", "SHELL"}
#: Flags, a JSON list, variables and here-documents.
_BUILDER_FORM = re.compile(r"^--|^\[|\$|<<")
_NETWORK = re.compile(
    r"(?:^|[\s;&|(])(?:apt-get|apt|apk|yum|dnf|pip3?|uvx?|npm|npx|curl|wget|git clone)\s", re.MULTILINE
)
_ROAD = (
    "It needs a container: the package harbor (Python 3.12 or newer) and Docker run it, with an agent that your own "
    "workflow points at model.base_url and model.api_key. If it names a docker_image and is in a registry, verifiers' "
    "taskset harbor runs it, too (examples/verifiers, with verifiers[harbor]). Or let its Dockerfile only copy files"
)


class NeedsContainerError(ValueError):
    """A task that cannot run in the sandbox; the message says why, and how it can be run."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder}: {reason}. {_ROAD}")


@dataclass(slots=True)
class HarborTask:
    """A task that runs in the sandbox."""

    folder: Path
    instruction: str
    workdir: str = "/app"
    copies: list[tuple[str, str]] = field(default_factory=list)  # from environment/, to a path of the container
    variables: dict[str, str] = field(default_factory=dict)
    verifier_variables: dict[str, str] = field(default_factory=dict)
    agent_s: float = 600.0
    verifier_s: float = 600.0

    @classmethod
    def read(cls, folder: Path) -> "HarborTask":
        """Raises NeedsContainerError, ValueError for a folder that is no task, OSError without its files."""
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        task = cls(folder, (folder / "instruction.md").read_text(encoding="utf-8").strip())
        environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
        if settings.get("steps"):
            raise NeedsContainerError(folder, "it has several steps")
        for key in ("docker_image", "mcp_servers", "healthcheck", "gpus"):
            if environment.get(key):
                raise NeedsContainerError(folder, f"environment.{key} of task.toml is {environment[key]!r}")
        if verifier.get("environment_mode") == "separate":
            raise NeedsContainerError(folder, "its verifier has an environment of its own")
        task.agent_s = float(settings.get("agent", {}).get("timeout_sec", task.agent_s))
        task.verifier_s = float(verifier.get("timeout_sec", task.verifier_s))
        task.variables |= environment.get("env", {})
        task.verifier_variables |= verifier.get("env", {})
        task._read_dockerfile()
        task.workdir = environment.get("workdir") or task.workdir
        found = _NETWORK.search((folder / "tests" / "test.sh").read_text(encoding="utf-8"))
        if found:
            raise NeedsContainerError(folder, f"tests/test.sh installs or downloads ({found[0].strip()})")
        return task

    def _read_dockerfile(self) -> None:
        environment = self.folder / "environment"
        if any(environment.glob("docker-compose.y*ml")):
            raise NeedsContainerError(self.folder, "environment/docker-compose.yaml describes several services")
        if not (environment / "Dockerfile").exists():
            self.copies += [(".", self.workdir)] if environment.is_dir() else []
            return
        for word, rest in _instructions((environment / "Dockerfile").read_text(encoding="utf-8")):
            if word == "WORKDIR":
                self.workdir = str(PurePosixPath(self.workdir, *self._words(word, rest)))
            elif word == "ENV":
                self.variables |= dict(pair.split("=", 1) for pair in self._words(word, rest))
            elif word == "COPY":
                *sources, target = self._words(word, rest)
                self.copies += [
                    (source, str(PurePosixPath(self.workdir, target)) + "/" * _is_folder(target)) for source in sources
                ]
            elif word not in _IDLE:
                raise self._refused(word, rest)

    def _words(self, word: str, rest: str) -> list[str]:
        """The words of an instruction. Raises NeedsContainerError for a form that only Docker reads."""
        try:
            words = shlex.split(rest)
        except ValueError:  # a quote without its end
            words = []
        fits = {
            "WORKDIR": len(words) == 1,
            "ENV": bool(words) and all("=" in pair for pair in words),
            "COPY": len(words) > 1 and not any(set(source) & set("*?[") for source in words[:-1]),
        }
        if not fits[word] or _BUILDER_FORM.search(rest):
            raise self._refused(word, rest)
        return words

    def _refused(self, word: str, rest: str) -> NeedsContainerError:
        return NeedsContainerError(self.folder, f"environment/Dockerfile has {word} {rest[:60]}")

    @property
    def roots(self) -> tuple[str, ...]:
        """Paths of the container that are folders in the sandbox."""
        return tuple(dict.fromkeys((*ROOTS, self.workdir)))

    def place(self, box: Path, path: str) -> Path:
        """Where a path of the container lies in the folder ``box``. Raises ValueError for a path outside ``roots``."""
        pure = PurePosixPath(path)
        if ".." in pure.parts or not any(pure.is_relative_to(root) for root in self.roots):
            raise NeedsContainerError(
                self.folder, f"it uses the path {path}, and only {', '.join(self.roots)} are there"
            )
        return box / pure.relative_to("/")

    def translate(self, text: str, box: Path) -> str:
        """``text`` with paths of the container replaced by those in ``box``."""
        roots = "|".join(re.escape(root) for root in sorted(self.roots, key=len, reverse=True))
        return re.sub(rf"(?<![\w./-])({roots})(?![\w.-])", lambda match: f"{box}{match[1]}", text)

    def fill(self, box: Path) -> None:
        """Make the folders and copy the files that the agent starts with."""
        for root in self.roots:
            self.place(box, root).mkdir(parents=True, exist_ok=True)
        for source, target in self.copies:
            start = (self.folder / "environment" / source.lstrip("/")).resolve()
            if not start.is_relative_to((self.folder / "environment").resolve()):
                raise ValueError(
                    f"{self.folder}: environment/Dockerfile copies {source}, which is outside environment/"
                )
            end = self.place(box, target)
            if start.is_dir():
                shutil.copytree(start, end, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
            else:
                end = end / start.name if target.endswith("/") or end.is_dir() else end
                end.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(start, end)

    def add_tests(self, box: Path, answer: str) -> None:
        """Put the tests into place, after the agent's last command, and its last answer as /logs/agent/answer.txt.

        A reward that lies there already is removed.
        """
        for root in ("/tests", "/logs", "/logs/verifier", "/logs/agent"):
            path = self.place(box, root)
            if path.is_symlink() or (path.exists() and not path.is_dir()):  # made by the agent, in place of the folder
                path.unlink()
        for root in ("/tests", "/logs/verifier", "/logs/agent"):
            shutil.rmtree(self.place(box, root), ignore_errors=True)
        for root in ("/logs/verifier", "/logs/agent"):
            self.place(box, root).mkdir(parents=True)
        (self.place(box, "/logs/agent") / "answer.txt").write_text(answer, encoding="utf-8")
        tests = self.place(box, "/tests")
        shutil.copytree(self.folder / "tests", tests)
        for file in filter(Path.is_file, tests.rglob("*")):
            try:
                file.write_text(self.translate(file.read_text(encoding="utf-8"), box), encoding="utf-8")
            except UnicodeDecodeError:  # data
                continue

    def rewards(self, box: Path) -> dict[str, float]:
        """What the tests wrote: ``reward.json``, or ``reward.txt`` as ``{"reward": ...}``. Raises ValueError."""
        folder = self.place(box, "/logs/verifier")
        if (folder / "reward.json").is_file():
            values = json.loads((folder / "reward.json").read_text(encoding="utf-8"))
        elif (folder / "reward.txt").is_file():
            values = {"reward": float((folder / "reward.txt").read_text(encoding="utf-8"))}
        else:
            raise ValueError(f"{self.folder}: tests/test.sh wrote neither reward.json nor reward.txt to /logs/verifier")
        rewards = {str(name): float(value) for name, value in values.items()}
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError(f"{self.folder}: tests/test.sh wrote the rewards {rewards}, expected finite numbers")
        return rewards


def _is_folder(target: str) -> bool:
    return target.endswith("/") or target in (".", "./")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile: their words and the rest."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()
