"""The servers of the web interface (``rft ui``), their readiness checks, and the switches of its sensors."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import rft_platform
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.supervisor import Server, as_service
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


def ui_servers(home: Home, port: int, mlflow_port: int, daemon: bool, metrics_port: int | None = None) -> list[Server]:
    """The Dagster webserver and MLflow; with ``daemon`` the daemon, with ``metrics_port`` the metrics server.

    An MLflow server that runs elsewhere is listed without a command.
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
    env, workspace = _environment(home, port), ("-w", str(_workspace(home)))
    token, url, tracking_uri = access_token(home.web_token), f"http://{_HOST}:{port}", _tracking_uri(home, config)
    elsewhere = _runs_elsewhere(tracking_uri)
    mlflow_url = redact(tracking_uri) if elsewhere else f"http://{_HOST}:{mlflow_port}"
    arguments = (*workspace, "-h", _HOST, "-p", str(port), *_log_format())
    servers = [
        Server(
            Service(
                "Dagster", dagster_server.__name__, arguments, env={ADDRESS: os.environ.get(ADDRESS, mlflow_url), **env}
            ),
            serves_guarded(url, dagster_server.HEALTH),
            url=sign_in_url(url, token),
            pages={"results": sign_in_url(url, token, _RESULTS)} if config is not None else {},
            restarts=True,
        )
    ]
    if elsewhere:
        servers.append(Server(Service("MLflow", ""), lambda: True, url=mlflow_url))
    else:
        servers.append(_mlflow(home, tracking_uri, mlflow_port, env, token))
    if daemon:
        service = as_service("daemon", ("dagster-daemon", "run", *workspace, *_log_format()), env)
        servers.append(Server(service, _beats(instance), restarts=True, leaves_work=True))
    if metrics_port is not None:
        servers.append(_metrics(metrics_port, env))
    return servers


def online_server(home: Home, project: "Project", port: int) -> Server:
    """How to start the online service of a project; ``port`` is the port of the Dagster interface."""
    explorer = project.config.explorer
    listens_on, probed = explorer.listen_address, _WILDCARDS.get(explorer.listen_address, explorer.listen_address)
    return Server(
        Service("service", "rft_platform.servers.online_service", env=_environment(home, port)),
        answers(f"{_url(probed, explorer.proxy_port)}/health", host="localhost"),
        url=f"{_url(listens_on, explorer.proxy_port)}/v1",
        pages={"status": f"{_url(listens_on, explorer.proxy_port)}/status"},
        restarts=True,
    )


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


def _metrics(port: int, env: Mapping[str, str]) -> Server:
    url = f"http://{_HOST}:{port}"
    return Server(
        Service("metrics", "rft_platform", ("metrics", "--port", str(port)), env=env),
        serves_guarded(url, "/healthz", guarded="/metrics"),
        url=f"{url}/metrics",
        restarts=True,
    )


def _log_format() -> list[str]:
    """Options that make Dagster's processes log JSON lines if the platform's processes do."""
    return ["--log-format", "json"] if wants_json() else []


def _mlflow(home: Home, tracking_uri: str, port: int, env: Mapping[str, str], token: str) -> Server:
    from rft_platform.model_registry.mlflow_client import make_database

    make_database(tracking_uri)  # created here, so that a killed server leaves no incomplete database
    url = f"http://{_HOST}:{port}"
    arguments = ("--host", _HOST, "--port", str(port), "--artifact-root", str(home.mlflow / "artifacts"))
    own = {**env, mlflow_server.BACKEND: tracking_uri}  # not an argument: `ps` would show a password in the URI
    return Server(
        Service("MLflow", mlflow_server.__name__, arguments, env=own),
        serves_guarded(url, mlflow_server.HEALTH),
        url=sign_in_url(url, token) + _curves(home, tracking_uri),
        restarts=True,
    )


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
            return httpx.get(url, headers=headers, timeout=2.0, trust_env=False).is_success
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
