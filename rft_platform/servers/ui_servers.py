"""The servers of ``rft ui`` and ``rft serve``: their declarations and checks, and the switches of the sensors."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import rft_platform
from rft_platform.cluster.interface import Service, tls_context
from rft_platform.cluster.local.service_process import of_command
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_text
from rft_platform.common.redaction import redact
from rft_platform.common.user_code import OWN_SAFE_PATH, SAFE_PATH
from rft_platform.config.home import Home
from rft_platform.model_registry.pages import ADDRESS, MLFLOW_PATH, run_page
from rft_platform.observability.logs import wants_json
from rft_platform.servers import dagster_server, mlflow_server
from rft_platform.servers.ports import Port
from rft_platform.web_guard.asgi import sign_in_url
from rft_platform.web_guard.token import access_token

if TYPE_CHECKING:
    import dagster as dg

    from rft_platform.config.schema.rft_config import RftConfig
    from rft_platform.rounds.project.project import Project

_HOST = "127.0.0.1"
_UI_URL = "RFT_UI_URL"  # as in jobs.alerts, which imports Dagster
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # all addresses -> the one that a check connects to
_BEAT_AGE_S = 120.0
_ANSWER_S = 180.0  # a server that is silent for so long is replaced
_PACKAGE = Path(rft_platform.__file__).parent

SENSORS = ("next_round_sensor", "experience_threshold_sensor")
_RESULTS = "/assets/evaluation_report"
_REPOSITORY = {"repositoryLocationName": "rft_platform", "repositoryName": "__repository__"}
_DEFINED = """
query($repository: RepositorySelector!) {
  repositoryOrError(repositorySelector: $repository) {
    ... on Repository { sensors { name } } ... on PythonError { message }
  }
}"""
_START = """
mutation($sensor: SensorSelector!) {
  startSensor(sensorSelector: $sensor) { __typename ... on PythonError { message } }
}"""
_START_TIMEOUT_S = 60.0
_START_POLL_S = 0.5


def ui_ports(
    home: Home, config: "RftConfig | None", port: int, mlflow_port: int, metrics_port: int | None = None
) -> list[Port]:
    """The ports that ``ui_servers`` will use; ``config`` is None for a home without a project."""
    ports = [Port(port, "Dagster", "--port")]
    if not _runs_elsewhere(_tracking_uri(home, config)):
        ports.append(Port(mlflow_port, "MLflow", "--mlflow-port"))
    if metrics_port is not None:
        ports.append(Port(metrics_port, "metrics", "--metrics-port"))
    return ports


def online_port(config: "RftConfig") -> Port:
    """The port of the online service."""
    return Port(config.explorer.proxy_port, "the service", "explorer.proxy_port")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that ``rft ui`` or ``rft serve`` lists, with the addresses for a browser."""

    name: str  # for people
    service: Service | None = None  # None: it runs elsewhere
    url: str = "running"
    pages: Mapping[str, str] = field(default_factory=dict)  # addresses of start pages, by their content


def ui_servers(home: Home, port: int, mlflow_port: int, daemon: bool, metrics_port: int | None = None) -> list[Server]:
    """The Dagster webserver and MLflow; with ``daemon`` the daemon, with ``metrics_port`` the metrics server.

    To add a server, write its declaration below and list it here.
    """
    from rft_platform.config.load import load_config_of
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.jobs import add_rounds
    from rft_platform.online.project import open_project

    instance = open_instance(home)
    instance.get_runs_count()  # creates the databases here, so that two servers do not race to create them
    config = load_config_of(home) if home.config_file.exists() else None
    if config is not None:
        add_rounds(instance, open_project(home))
    env, tracking_uri = _environment(home, port), _tracking_uri(home, config)
    workspace = ("-w", str(_workspace(home)), *_log_format())
    if _runs_elsewhere(tracking_uri):
        mlflow_url = redact(tracking_uri)
        mlflow = Server("MLflow", url=mlflow_url)
    else:
        mlflow_url = f"http://{_HOST}:{mlflow_port}"
        mlflow = _mlflow(home, tracking_uri, mlflow_port, env)
    dagster_env = {ADDRESS: os.environ.get(ADDRESS, mlflow_url), **env}
    return [
        _dagster(home, port, workspace, dagster_env, has_results=config is not None),
        mlflow,
        *([_daemon(instance, workspace, env)] if daemon else []),
        *([_metrics(metrics_port, env)] if metrics_port is not None else []),
    ]


def _dagster(home: Home, port: int, workspace: Sequence[str], env: Mapping[str, str], has_results: bool) -> Server:
    url, token = f"http://{_HOST}:{port}", access_token(home.web_token)
    service = Service(
        "dagster",
        dagster_server.__name__,
        ("-h", _HOST, "-p", str(port), *workspace),
        env=env,
        port=port,
        answer_s=_ANSWER_S,
        is_ready=serves_guarded(url, dagster_server.HEALTH),
    )
    pages = {"results": sign_in_url(url, token, _RESULTS)} if has_results else {}
    return Server("Dagster", service, sign_in_url(url, token), pages)


def _mlflow(home: Home, tracking_uri: str, port: int, env: Mapping[str, str]) -> Server:
    from rft_platform.model_registry.mlflow_client import make_database

    make_database(tracking_uri)  # created here, so that a killed server leaves no incomplete database
    url = f"http://{_HOST}:{port}"
    service = Service(
        "mlflow",
        mlflow_server.__name__,
        ("--host", _HOST, "--port", str(port), "--artifact-root", str(home.mlflow / "artifacts")),
        env={**env, mlflow_server.BACKEND: tracking_uri},  # not an argument: `ps` would show a password in the URI
        port=port,
        answer_s=_ANSWER_S,
        is_ready=serves_guarded(url, mlflow_server.HEALTH),
    )
    return Server("MLflow", service, sign_in_url(url, access_token(home.web_token)) + _curves(home, tracking_uri))


def _daemon(instance: "dg.DagsterInstance", workspace: Sequence[str], env: Mapping[str, str]) -> Server:
    module, arguments = of_command(("dagster-daemon", "run", *workspace))
    service = Service(
        "daemon",
        module,
        arguments,
        env=env,
        answer_s=_ANSWER_S,
        is_ready=_beats(instance),
        leaves_work=True,
    )
    return Server("daemon", service)


def _metrics(port: int, env: Mapping[str, str]) -> Server:
    url = f"http://{_HOST}:{port}"
    service = Service(
        "metrics",
        "rft_platform",
        ("metrics", "--port", str(port)),
        env=env,
        port=port,
        answer_s=_ANSWER_S,
        is_ready=serves_guarded(url, "/healthz", guarded="/metrics"),
    )
    return Server("metrics", service, f"{url}/metrics")


def online_server(home: Home, project: "Project", port: int) -> Server:
    """The online service of a project; ``port`` is the port of the Dagster interface."""
    explorer = project.config.explorer
    listens_on, probed = explorer.listen_address, _WILDCARDS.get(explorer.listen_address, explorer.listen_address)
    url = _url(listens_on, explorer.proxy_port)
    service = Service(
        "service",
        "rft_platform.servers.online_service",
        env=_environment(home, port),
        port=explorer.proxy_port,
        answer_s=_ANSWER_S,
        is_ready=answers(f"{_url(probed, explorer.proxy_port)}/health", host="localhost"),
    )
    return Server("service", service, f"{url}/v1", {"status": f"{url}/status"})


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _workspace(home: Home) -> Path:
    """Write the workspace file of ``home``; returns its path.

    Without a working directory Dagster puts the folder in which it was started first on the module path while it loads
    the definitions. The user's files in that folder would shadow libraries.
    """
    location = {"module_name": "rft_platform.definitions", "location_name": "rft_platform"}
    module = {**location, "working_directory": str(_PACKAGE.parent)}
    file = home.dagster / "workspace.yaml"
    write_text(file, yaml.safe_dump({"load_from": [{"python_module": module}]}))
    return file


def _log_format() -> list[str]:
    """Options that make Dagster's processes log JSON lines if the platform's processes do."""
    return ["--log-format", "json"] if wants_json() else []


def _curves(home: Home, tracking_uri: str) -> str:
    """The page with the project's curves, as a suffix of MLflow's address; "" before the first run."""
    from rft_platform.config.load import load_config_of
    from rft_platform.model_registry.sqlite_reader import read_training_run

    if not home.config_file.exists():
        return ""
    config = load_config_of(home)
    found = read_training_run(tracking_uri, config.project, config.name)
    return "" if found is None else f"#{run_page(*found)}"


def interface_links(home: Home, host: str) -> list[tuple[str, str]]:
    """Names and addresses of Dagster and MLflow for a browser that reaches this machine as ``host``.

    Interfaces that do not run are left out; an MLflow server elsewhere is always listed. ``RFT_UI_URL`` replaces the
    address of Dagster.
    """
    from rft_platform.config.load import load_config_of
    from rft_platform.jobs.driver_lock import interface_port

    port, tracking_uri = interface_port(home), _tracking_uri(home, load_config_of(home))
    running = "" if port is None else os.environ.get(_UI_URL, _url(host, port)).rstrip("/")
    found = [("Dagster", running)] if running else []
    if _runs_elsewhere(tracking_uri):
        found.append(("MLflow", redact(tracking_uri)))
    elif running:
        found.append(("MLflow", f"{running}{MLFLOW_PATH}{_curves(home, tracking_uri)}"))
    return found


def _runs_elsewhere(tracking_uri: str) -> bool:
    """Whether a tracking URI names an MLflow server; such a server runs elsewhere and is not started here."""
    return tracking_uri.startswith(("http://", "https://"))


def _tracking_uri(home: Home, config: "RftConfig | None") -> str:
    configured = None if config is None else config.registry.tracking_uri
    return os.environ.get("MLFLOW_TRACKING_URI") or configured or f"sqlite:///{home.mlflow / 'mlflow.db'}"


def _environment(home: Home, port: int) -> dict[str, str]:
    return {
        _UI_URL: os.environ.get(_UI_URL, f"http://{_HOST}:{port}"),
        "RFT_HOME": str(home.root),
        "DAGSTER_HOME": str(home.dagster),
        SAFE_PATH: OWN_SAFE_PATH,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # MLflow's evaluation jobs would be idle processes here
    }


def serves_guarded(url: str, health: str, guarded: str = "/") -> Callable[[], bool]:
    """A readiness check of the server at ``url``; the check raises RftError if ``guarded`` needs no token."""
    is_healthy, is_open = answers(url + health), answers(url + guarded)

    def is_ready() -> bool:
        if not is_healthy():
            return False
        if is_open():
            raise RftError(f"{url}{guarded} answers without an access token: install the pinned package versions")
        return True

    return is_ready


def answers(url: str, host: str | None = None) -> Callable[[], bool]:
    """A check whether ``url`` answers with success. ``host`` is the Host header, by default the host of ``url``."""
    import httpx

    headers = {} if host is None else {"host": host}

    def is_ready() -> bool:
        try:
            return httpx.get(url, headers=headers, timeout=2.0, trust_env=False, verify=tls_context()).is_success
        except httpx.HTTPError:
            return False

    return is_ready


def _beats(instance: "dg.DagsterInstance") -> Callable[[], bool]:
    """A check for a daemon heartbeat after this call and within ``_BEAT_AGE_S``; Dagster writes one every 30 s."""
    started = time.time()

    def is_ready() -> bool:
        oldest = max(started, time.time() - _BEAT_AGE_S)
        return any(beat.timestamp >= oldest for beat in instance.get_daemon_heartbeats().values())

    return is_ready


def start_sensors(url: str, token: str) -> None:
    """Turn on the round sensors that the project has, through the webserver at ``url``, as its switches do.

    Raises RftError if a sensor cannot be turned on within 60 s.
    """
    import httpx

    deadline, headers = time.monotonic() + _START_TIMEOUT_S, {"Authorization": f"Bearer {token}"}

    def ask(query: str, variables: dict[str, Any], wanted: Callable[[dict[str, Any]], Any], problem: str) -> Any:
        while True:  # the interface answers before it has loaded the code location
            try:
                body = {"query": query, "variables": variables}
                reply = httpx.post(f"{url}/graphql", json=body, headers=headers, timeout=30.0, trust_env=False).json()
            except (httpx.HTTPError, ValueError) as error:
                reply = {"error": str(error)}
            if found := wanted(reply.get("data") or {}):
                return found
            if time.monotonic() > deadline:
                raise RftError(f"{problem} at {url}: {reply}; turn the sensors on under Automation there")
            time.sleep(_START_POLL_S)

    defined = ask(
        _DEFINED,
        {"repository": _REPOSITORY},
        lambda data: [sensor["name"] for sensor in (data.get("repositoryOrError") or {}).get("sensors", ())],
        "no sensors are defined",
    )
    for name in set(SENSORS) & set(defined):
        ask(
            _START,
            {"sensor": {**_REPOSITORY, "sensorName": name}},
            lambda data: (data.get("startSensor") or {}).get("__typename") == "Sensor",
            f"{name} could not be turned on",
        )
