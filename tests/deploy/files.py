"""What the tests of ``deploy/`` read: its files, and the documents in them."""

from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes*/*.yaml"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))


def documents(file: Path) -> list[Any]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all(file.read_text()))


def text_of_all() -> str:
    """Everything that stands in ``deploy/``."""
    return "\n".join(file.read_text() for file in sorted(DEPLOY.rglob("*")) if file.is_file())


def containers(document: Any) -> list[Any]:
    """The containers, initial ones too, of a manifest that has a pod template."""
    spec = document.get("spec", {})
    pod = spec.get("template", {}).get("spec", {}) if document.get("kind") in ("Deployment", "StatefulSet") else {}
    return [*pod.get("containers", []), *pod.get("initContainers", [])]
