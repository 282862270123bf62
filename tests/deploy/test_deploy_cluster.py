"""``deploy/kubernetes-cluster``: its parts name each other; Dagster's loader and the Kubernetes API accept the rest.

The tests of the launchers need dagster-k8s and dagster-ray, which the platform does not install.
"""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.jobs.instance import shipped_settings
from rft_platform.online.project import project_in
from rft_platform.run.cluster_checks import machine_of
from tests.deploy.files import DEPLOY, REPOSITORY, containers, documents

FOLDER = DEPLOY / "kubernetes-cluster"
DAGSTER = FOLDER / "dagster"
#: Every object of the overlay and of what it is based on, by kind and name.
OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each
    for folder in (DEPLOY / "kubernetes", FOLDER)
    for file in sorted(folder.glob("*.yaml"))
    for each in documents(file)
    if each["kind"] != "Kustomization"
}
KUSTOMIZATION = documents(FOLDER / "kustomization.yaml")[0]


def project(name: str) -> RftConfig:
    return load_config(FOLDER / "project" / name)


def pod_of(kind: str, name: str) -> Any:
    return OBJECTS[kind, name]["spec"]["template"]["spec"]


def environment(container: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_overlay_patches_and_generates_what_exists() -> None:
    for each in KUSTOMIZATION["patches"]:
        patch = yaml.safe_load(each["patch"])
        assert (patch["kind"], patch["metadata"]["name"]) in OBJECTS
        if "$patch" not in patch:  # an init script that replaces the one of the base, and holds it
            base = OBJECTS[patch["kind"], patch["metadata"]["name"]]["data"]["init.sql"]
            assert patch["data"]["init.sql"].startswith(base)
    for each in KUSTOMIZATION["configMapGenerator"]:
        for file in each["files"]:
            assert (FOLDER / file.rpartition("=")[2]).is_file(), file
    for resource in KUSTOMIZATION["resources"]:
        assert (FOLDER / resource).exists(), resource


def test_every_pod_of_the_platform_has_the_image_that_is_pushed(tmp_path: Path) -> None:
    base = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]
    names = {
        each["name"]: each["newName"] for each in base["images"]
    }  # the overlay sees what the base has made of them
    taken = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in KUSTOMIZATION["images"]}
    used = {each["image"] for manifest in OBJECTS.values() for each in containers(manifest)}
    images = {taken.get(names.get(image, image)) for image in used if image.startswith("rft-platform")}
    assert images == {"registry.example/rft-platform-cluster:0.1.0"}

    if shutil.which("kubectl") is None:
        return
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    folder = tmp_path / "deploy" / "kubernetes"
    shutil.copy(folder / "secrets.example.yaml", folder / "secrets.yaml")
    command = ["kubectl", "kustomize", tmp_path / "deploy" / "kubernetes-cluster"]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert set(re.findall(r"^ +image: .*rft-platform.*$", built, re.MULTILINE)) == {f"        image: {images.pop()}"}


def test_volumes_accounts_and_services_that_are_named_exist() -> None:
    generated = {each["name"] for each in KUSTOMIZATION["configMapGenerator"]}
    deleted = [yaml.safe_load(each["patch"])["metadata"]["name"] for each in KUSTOMIZATION["patches"]][:-1]
    for (kind, name), each in OBJECTS.items():
        if kind not in ("Deployment", "StatefulSet") or name in deleted:
            continue
        pod = pod_of(kind, name)
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in OBJECTS
            if "configMap" in volume:
                config_map = volume["configMap"]["name"]
                assert config_map in generated or ("ConfigMap", config_map) in OBJECTS, config_map
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in OBJECTS
        if kind == "StatefulSet":
            assert OBJECTS["Service", each["spec"]["serviceName"]]["spec"]["selector"] == {"app": name}


def test_the_project_names_the_pods_of_the_engines() -> None:
    engines, port = OBJECTS["StatefulSet", "rft-engine"], OBJECTS["Service", "rft-engine"]["spec"]["ports"][0]["port"]
    served, count = project("explorer.yaml"), engines["spec"]["replicas"]
    assert served.engine.urls == [f"http://rft-engine-{number}.rft-engine:{port}" for number in range(count)]
    assert served.explorer.rollout_model.engine_num == count
    (container,) = containers(engines)
    assert environment(container)["RFT_WEB_HOSTS"] == "$(POD).rft-engine"
    assert f"--port={port}" in container["command"]
    for name in ("rft-engine", "rft-serve"):
        (each,) = containers(OBJECTS["StatefulSet", name])
        assert served.engine.token_env in environment(each)
    assert served.explorer.proxy_port == OBJECTS["Service", "rft-serve"]["spec"]["ports"][0]["port"]


def test_the_files_of_both_tiers_agree_and_their_paths_are_mounted() -> None:
    served, trained = project("explorer.yaml"), project("trainer.yaml")
    assert (served.mode, trained.mode) == ("serve", "train")
    for key in ("project", "name", "model", "checkpoint_root_dir"):
        assert getattr(served, key) == getattr(trained, key), key
    database = served.buffer.trainer_input.experience_buffer
    assert database == trained.buffer.trainer_input.experience_buffer
    assert str(database.path).endswith("@postgres:5432/traffic")
    for name in ("rft-engine", "rft-serve", "rft-train"):
        pod = pod_of("StatefulSet", name)
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        claims = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
        assert claims[mounts["/shared"]] == "rft-shared"
        assert str(served.model.model_path).startswith("/shared/")
        assert str(served.checkpoint_root_dir).startswith("/shared/")


def test_the_dagster_settings_are_the_platforms_but_for_the_launcher() -> None:
    ours, shipped = documents(DAGSTER / "kubernetes.yaml")[0], yaml.safe_load(shipped_settings())
    assert ours.pop("storage") == {"postgres": {"postgres_url": {"env": "RFT_DAGSTER_POSTGRES_URL"}}}
    assert ours.pop("run_launcher") != shipped.pop("run_launcher")
    assert ours["concurrency"]["runs"].pop("max_concurrent_runs") == 1
    assert ours["run_monitoring"].pop("start_timeout_seconds") > shipped["run_monitoring"].pop("start_timeout_seconds")
    del shipped["concurrency"]["runs"]["max_concurrent_runs"]
    assert ours == shipped


@pytest.mark.parametrize("launcher", ["kubernetes", "ray", None])
def test_the_start_expects_the_trainers_gpus_where_runs_are_launched(tmp_path: Path, launcher: str | None) -> None:
    home = Home(tmp_path)
    home.dagster.mkdir()
    settings = shipped_settings() if launcher is None else (DAGSTER / f"{launcher}.yaml").read_text()
    (home.dagster / "dagster.yaml").write_text(settings)
    assert machine_of(project_in(home, project("trainer.yaml"))).trains is (launcher is None)


def test_both_launchers_pass_the_same_variables_to_a_run() -> None:
    launchers = [documents(DAGSTER / f"{name}.yaml")[0]["run_launcher"]["config"] for name in ("kubernetes", "ray")]
    of_pod = {each["name"] for each in launchers[0]["run_k8s_config"]["container_config"]["env"]}
    of_job = set(launchers[1]["ray"]["env_vars"])
    of_store = {name for name in of_job if name.startswith("AWS_")}  # a pod that has none takes those of its account
    assert of_job - of_store == of_pod | {"RFT_HOME"}, "the image of the pods sets the home"
    assert of_pod <= set(environment(pod_of("StatefulSet", "rft-train")["containers"][0]))
    assert of_store == set(re.findall(r"AWS_[A-Z_]+", (REPOSITORY / "docs" / "store.md").read_text()))


def instance_in(home: Path, settings: dict[str, Any]) -> dg.DagsterInstance:
    """The instance that Dagster loads from these settings."""
    settings.pop("storage", None)  # SQLite
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
    return dg.DagsterInstance.from_config(str(home))


class ApiServer(BaseHTTPRequestHandler):
    """Stores what is posted, as the Kubernetes API does."""

    posted: list[Any]

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.posted.append((self.path, document))
        body = json.dumps(document).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def api() -> Iterator[tuple[str, list[Any]]]:
    """Address of an API server, and what was posted to it."""
    handler = type("Handler", (ApiServer,), {"posted": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.posted
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_the_job_of_a_run_fits_the_kubernetes_api(tmp_path: Path, api: tuple[str, list[Any]]) -> None:
    """The launcher of dagster/kubernetes.yaml posts it; only the address of the API differs."""
    pytest.importorskip("dagster_k8s", reason="needs dagster-k8s, which the cluster's image installs")
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    url, posted = api
    settings = documents(DAGSTER / "kubernetes.yaml")[0]
    access = tmp_path / "kubeconfig"
    cluster, context = {"name": "here", "cluster": {"server": url}}, {"cluster": "here", "user": "me"}
    access.write_text(yaml.safe_dump({
        "current-context": "here", "clusters": [cluster], "contexts": [{"name": "here", "context": context}],
        "users": [{"name": "me", "user": {}}],
    }))  # fmt: skip
    settings["run_launcher"]["config"] |= {"load_incluster_config": False, "kubeconfig_file": str(access)}
    with instance_in(tmp_path, settings) as instance:
        launch(instance)
    (place, job), *_ = posted
    assert place == "/apis/batch/v1/namespaces/rft/jobs"
    kubernetes_validate.validate(job, "1.34", strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["serviceAccountName"] == "rft-run" and pod["automountServiceAccountToken"] is False
    assert {each["name"] for each in container["volumeMounts"]} <= {each["name"] for each in pod["volumes"]}
    assert {"PGPASSWORD", "RFT_EXCHANGE_KEY", "RFT_DAGSTER_POSTGRES_URL"} <= set(environment(container))
    image = next(each for each in KUSTOMIZATION["images"])
    assert container["image"] == f"{image['newName']}:{image['newTag']}"


def launch(instance: dg.DagsterInstance) -> None:
    """Launch a run as the daemon would."""
    from dagster._core.code_pointer import ModuleCodePointer
    from dagster._core.launcher import LaunchRunContext
    from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
    from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
    from dagster._core.test_utils import create_run_for_test

    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("rft_platform"), "__repository__")
    python = RepositoryPythonOrigin("python", ModuleCodePointer("rft_platform.definitions", "defs"))
    run = create_run_for_test(
        instance,
        job_name="empty_job",
        remote_job_origin=RemoteJobOrigin(repository, "empty_job"),
        job_code_origin=JobPythonOrigin("empty_job", python),
    )
    instance.run_launcher.launch_run(LaunchRunContext(run, workspace=None))


@pytest.mark.slow
def test_dagster_loads_the_launcher_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dagster_ray = pytest.importorskip("dagster_ray", reason="needs dagster-ray and Ray")
    monkeypatch.setenv("RAY_ADDRESS", "http://ray-head:8265")
    settings = yaml.safe_load(shipped_settings()) | documents(DAGSTER / "ray.yaml")[0]
    with instance_in(tmp_path, settings) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, dagster_ray.RayRunLauncher)
        assert (launcher.address, launcher.num_gpus) == ("http://ray-head:8265", 1)
        assert set(launcher.env_vars) >= {"RFT_HOME", "RFT_DAGSTER_POSTGRES_URL"}
