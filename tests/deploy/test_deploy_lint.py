"""What stands in ``deploy/`` is linted and valid by its own schema. Nothing here needs a network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import check_jsonschema
import jsonschema
import pytest
import yaml

from tests.deploy.files import COMPOSE, DEPLOY, MANIFESTS, REPOSITORY, containers, documents, text_of_all


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("Dockerfile")), ids=lambda file: file.parent.name)
def test_dockerfiles_pass_hadolint(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_yaml_file_passes_yamllint() -> None:
    command = [sys.executable, "-m", "yamllint", "--strict", "-c", DEPLOY / "yamllint.yaml", DEPLOY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_fit_the_compose_specification(file: Path) -> None:
    schemas = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(yaml.safe_load(file.read_text()))] == []


def test_compose_names_fit_together() -> None:
    """What a schema does not see: services, volumes and conditions that are named must be there."""
    compose = documents(DEPLOY / "compose.yaml")[0]
    services = compose["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} depends on {needed}"
            if how["condition"] == "service_healthy":
                built = "build" in services[needed]  # then the image's own healthcheck counts
                assert "healthcheck" in services[needed] or built, f"{needed} has no healthcheck"
        for key in ("pid", "network_mode"):
            if key in service:
                assert service[key].removeprefix("service:") in services
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            elif not source.startswith("$"):
                assert source in compose["volumes"], f"{name}: {source}"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is published beyond this machine"
    assert set(documents(DEPLOY / "compose.gpu.yaml")[0]["services"]) <= set(services)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_manifests_fit_the_kubernetes_api(file: Path) -> None:
    if file.name == "kustomization.yaml":
        resources = {each for each in documents(file)[0]["resources"] if not each.startswith("../")}
        beside = {each.name for each in MANIFESTS if each.parent == file.parent}
        assert resources - {"secrets.yaml"} == beside - {"secrets.example.yaml", file.name}
        return
    reason = "needs kubernetes-validate: pip install 'rft-platform[deploy]'"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    for document in documents(file):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_pods_run_without_root_and_their_probes_name_their_ports() -> None:
    for document in (document for file in MANIFESTS for document in documents(file)):
        template = document.get("spec", {}).get("template") if document.get("kind") != "Service" else None
        if template is None:
            continue
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod.get("automountServiceAccountToken", pod.get("serviceAccountName") != "rft-launcher")
        claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | claims
        for container in containers(document):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["containerPort"] for port in container.get("ports", [])}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in ports, container["name"]


def test_secrets_are_referenced_and_never_given() -> None:
    example = documents(DEPLOY / "kubernetes" / "secrets.example.yaml")[0]["stringData"]
    referenced = re.findall(r"secretKeyRef:\s*(?:\{name: rft, key: (\w+)|\n\s+name: rft\n\s+key: (\w+))", text_of_all())
    assert {first or second for first, second in referenced} == set(example)
    for name, value in example.items():
        assert value == "" or "PASSWORD" in value, f"{name} has a value"
    for line in text_of_all().splitlines():
        if match := re.search(r"(?i)(?:password|token)(?!_env)\w*:\s*(\S+)", line):
            assert match[1][0] in '$?-"{' or match[1] in ("true", "false"), line
    ignored = (REPOSITORY / ".gitignore").read_text()
    assert "deploy/.env" in ignored
    assert "deploy/kubernetes/secrets.yaml" in ignored
