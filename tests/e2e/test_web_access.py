"""Who reaches what `rft ui` serves: its user, from a real browser; a hostile page in that browser; another local user.

It runs in a folder whose files bear the names of libraries, as a user's folder may.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser import Tab, browser
from dagster_graphql import DagsterGraphQLClient
from interface import Ui, running_ui

from rft_platform.config.home import Home
from rft_platform.model_registry.pages import WORKFLOW
from rft_platform.rounds.project.project import Project
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: What a careless user may call a file: modules of the standard library and of ours, imported early or late.
SHADOWS = ("gql", "types", "datasets", "httpx", "duckdb", "statistics", "yaml", "queue", "tokenizers")
JUDGE = "def length(task, response) -> float:\n    return float(len(response) % 2)\n"
MUTATION = (
    'mutation{addDynamicPartition(repositorySelector:{repositoryLocationName:"rft_platform",'
    'repositoryName:"__repository__"},partitionsDefName:"rft_round",partitionKey:"KEY"){__typename}}'
)
PARTITIONS = (
    'query{assetNodeOrError(assetKey:{path:["policy_snapshot"]}){... on AssetNode{'
    "partitionKeysByDimension{partitionKeys}}}}"
)
RUNS_OF_JOB = """
query($job: String!) {
  pipelineOrError(
    params: {repositoryLocationName: "rft_platform", repositoryName: "__repository__", pipelineName: $job}
  ) { ... on Pipeline { runs(limit: 1) { runId repositoryOrigin { repositoryLocationName } } } }
}"""
TIMELINE = (
    "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name runs(limit: 1) { runId } } } } } }"
)
EXECUTE_AGAIN = """
mutation($parent: String!) {
  launchPipelineReexecution(reexecutionParams: {parentRunId: $parent, strategy: ALL_STEPS}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""
#: Every way in which a page can send something to another origin without its consent.
HOSTILE_PAGE = """<!doctype html><title>hostile</title><body><script>
const [ui, mlflow, metrics] = TARGETS;
const mutation = key => `MUTATION`.replace('KEY', key);
const body = key => JSON.stringify({query: mutation(key)});
const experiment = JSON.stringify({name: 'hostile'});
const ended = promise => promise.then(answer => 'read: ' + answer).catch(() => 'refused');
const loaded = (tag, url) => new Promise((resolve, reject) => {
  const element = document.createElement(tag);
  element.onload = () => resolve('loaded'); element.onerror = reject; element.src = url; document.body.append(element);
});
const submitted = (url, name, value) => new Promise(resolve => {
  const frame = document.createElement('iframe'); frame.name = name; document.body.append(frame);
  const form = document.createElement('form');
  form.action = url; form.method = 'POST'; form.enctype = 'text/plain'; form.target = name;
  const field = document.createElement('input'); field.name = value; form.append(field); document.body.append(form);
  frame.onload = () => resolve('sent'); form.submit(); setTimeout(() => resolve('sent'), 3000);
});
const get = key => `${ui}/graphql?query=${encodeURIComponent(mutation(key))}`;
const text = {'content-type': 'text/plain'}, json = {'content-type': 'application/json'};
const post = (url, mode, headers, body) => fetch(url, {method: 'POST', mode, headers, body, credentials: 'include'});
const experiments = mlflow + '/api/2.0/mlflow/experiments/create';
window.attack = () => Promise.all([
  ended(loaded('img', get('r0901'))),
  ended(loaded('script', get('r0902'))),
  submitted(`${ui}/graphql`, 'form', body('r0903')),
  submitted(get('r0904'), 'query', ''),
  ended(post(`${ui}/graphql`, 'no-cors', text, body('r0905')).then(() => Promise.reject())),
  ended(post(`${ui}/graphql`, 'cors', json, body('r0906')).then(answer => answer.text())),
  ended(post(`${ui}/report_asset_materialization/base_model`, 'no-cors', text, '').then(() => Promise.reject())),
  ended(fetch(`${ui}/graphql?query={version}`, {credentials: 'include'}).then(answer => answer.text())),
  ended(fetch(`${metrics}/metrics`, {credentials: 'include'}).then(answer => answer.text())),
  ended(post(experiments, 'no-cors', text, experiment).then(() => Promise.reject())),
  ended(post(experiments, 'cors', json, experiment).then(answer => answer.text())),
  ended(new Promise((resolve, reject) => {
    const socket = new WebSocket(ui.replace('http', 'ws') + '/graphql', 'graphql-ws');
    socket.onopen = () => resolve('websocket'); socket.onerror = reject;
  })),
]);
</script>"""


@pytest.fixture(scope="module")
def project(make_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project in a folder of its user's, who has a judge there and files that bear the names of libraries."""
    folder = tmp_path_factory.mktemp("user")
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise ImportError('the file {name}.py of the user was imported')\n")
    (folder / "my_judge.py").write_text(JUDGE)
    made = make_project("access", explorer={"workers": {"kind": "process", "count": 1}})
    made.config.write_text(made.config.read_text().replace("judge_by_digits:digit_share", "my_judge:length"))
    made.cwd = folder
    return made


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def ui(project: Any, metrics_port: int) -> Iterator[Ui]:
    with running_ui(project, "--metrics-port", str(metrics_port)) as interface:
        interface.add_round("r0001")
        yield interface


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A browser in which every name below evil.example is this machine, as after DNS rebinding."""
    folder = tmp_path_factory.mktemp("browser")
    with browser(folder, "--host-resolver-rules=MAP *.example 127.0.0.1") as page:
        yield page


@pytest.fixture(scope="module")
def signed_in(ui: Ui, tab: Tab) -> Tab:
    """The browser after its user has opened both links that `rft ui` printed."""
    for url in (ui.url, ui.mlflow_url):
        tab.open(f"{url}/?token={ui.token}")
    return tab


@pytest.fixture(scope="module")
def first_round(ui: Ui, project: Any) -> dict[str, Any]:
    """What a `rft run` beside `rft ui` noted on the policy of its first round."""
    project.rft("run", "--config", str(project.config), "--rounds", "1")
    return dict(project.note(1, "policy"))


def partitions(ui: Ui) -> list[str]:
    node = ui.ask(PARTITIONS)["assetNodeOrError"]
    return list(node["partitionKeysByDimension"][0]["partitionKeys"])


def experiments(ui: Ui) -> list[str]:
    headers = {"Authorization": f"Bearer {ui.token}"}
    url = f"{ui.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=100"
    return [found["name"] for found in httpx.get(url, headers=headers).json()["experiments"]]


@contextmanager
def site(folder: Path, page: str) -> Iterator[int]:
    """A web server of somebody else on a loopback port, which serves ``page``."""
    (folder / "index.html").write_text(page)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_another_local_user_is_refused_on_every_port(ui: Ui) -> None:
    children = psutil.Process(ui.process.pid).children(recursive=True)
    listening = {
        connection.laddr.port
        for process in children
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 3
    for port in listening:
        url = f"http://127.0.0.1:{port}"
        for path in ("/", "/graphql?query={version}", "/api/2.0/mlflow/experiments/search", "/metrics", "/logs/x/out"):
            assert httpx.get(url + path, trust_env=False).status_code in (401, 404, 405), (port, path)
        for headers in ({}, {"authorization": "Bearer 0123456789abcdef"}, {"host": "evil.example"}):
            answer = httpx.post(f"{url}/graphql", json={"query": MUTATION}, headers=headers, trust_env=False)
            assert answer.status_code in (401, 403, 404), (port, headers)
    assert partitions(ui) == ["r0001"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1"], ids=["another site", "another port"])
def test_a_hostile_page_changes_and_reads_nothing(
    ui: Ui, signed_in: Tab, metrics_port: int, tmp_path: Path, host: str
) -> None:
    targets = str([ui.url, ui.mlflow_url, f"http://127.0.0.1:{metrics_port}"])
    with site(tmp_path, HOSTILE_PAGE.replace("TARGETS", targets).replace("MUTATION", MUTATION)) as port:
        signed_in.open(f"http://{host}:{port}/")
        outcome = signed_in.run("window.attack()")
    assert len(outcome) == 12
    assert set(outcome) <= {"refused", "sent"}, outcome
    assert partitions(ui) == ["r0001"]
    assert "hostile" not in experiments(ui)


def test_dns_rebinding_is_refused(ui: Ui, signed_in: Tab, metrics_port: int) -> None:
    for url, path in ((ui.url, "/graphql"), (ui.mlflow_url, "/"), (f"http://127.0.0.1:{metrics_port}", "/metrics")):
        signed_in.open(url.replace("127.0.0.1", "rebound.example") + path)
        assert "rebound.example" in signed_in.run("document.body.innerText")
        body = "{method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'}"
        assert signed_in.run(f"fetch('{path}', {body}).then(answer => answer.status)") == 403


def test_the_user_works_in_the_browser(ui: Ui, signed_in: Tab) -> None:
    signed_in.statuses.clear()
    signed_in.open(f"{ui.url}/overview/activity/timeline?token={ui.token}")
    assert signed_in.run("location.href") == f"{ui.url}/overview/activity/timeline"
    assert signed_in.run("document.cookie") == ""  # out of reach of scripts
    signed_in.wait_for("document.body.innerText.includes('Timeline')")
    signed_in.open(f"{ui.url}/jobs")
    signed_in.wait_for("document.body.innerText.includes('sync_round_job')")
    refused = {url for url, status in signed_in.statuses.items() if url.startswith(ui.url) and status >= 400}
    assert refused == set()
    opened = "new Promise((yes, no) => { const s = new WebSocket(`ws://${location.host}/graphql`, 'graphql-ws');"
    assert signed_in.run(f"{opened} s.onopen = () => yes('open'); s.onerror = () => no('failed'); }})") == "open"
    signed_in.open(ui.mlflow_url)
    signed_in.wait_for("document.body.innerText.includes('Experiments')")


@pytest.mark.filterwarnings("ignore:Using variable_values:DeprecationWarning")  # by Dagster's client
def test_scripts_launch_runs_and_the_users_modules_are_found(ui: Ui, project: Any) -> None:
    host, port = ui.url.removeprefix("http://").split(":")
    headers = {"Authorization": f"Bearer {ui.token}"}
    client = DagsterGraphQLClient(host, port_number=int(port), headers=headers)
    run = client.submit_job_execution("warm_start_job")
    assert ui.end_of(run, timeout=600) == "SUCCESS", ui.tags(run)


@pytest.mark.usefixtures("first_round")
def test_files_of_the_user_shadow_no_library_of_engine_trainer_and_workers(project: Any) -> None:
    assert project.note(1, "explore")["rows"]


@pytest.mark.usefixtures("first_round")
def test_runs_of_commands_are_shown_with_their_job_and_can_be_executed_again(ui: Ui, project: Any) -> None:
    """`rft run` and `rft judge` work beside `rft ui`; their runs look like any other."""
    project.rft("judge", "--rounds", "1", "--judge", "my_judge:length")
    for job in ("explore_job", "sync_round_job", "judge_job"):
        on_its_page = ui.ask(RUNS_OF_JOB, job=job)["pipelineOrError"]["runs"]
        assert on_its_page, f"the page of {job} shows no run"
        assert on_its_page[0]["repositoryOrigin"]["repositoryLocationName"] == "rft_platform"
    (repository,) = ui.ask(TIMELINE)["repositoriesOrError"]["nodes"]
    assert {job["name"] for job in repository["jobs"] if job["runs"]} >= {"explore_job", "judge_job", "warm_start_job"}
    again = ui.ask(EXECUTE_AGAIN, parent=on_its_page[0]["runId"])["launchPipelineReexecution"]
    assert again["__typename"] == "LaunchRunSuccess", again
    assert ui.end_of(again["run"]["runId"], timeout=600) == "SUCCESS", ui.tags(again["run"]["runId"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_links_of_an_asset_open_its_run_and_its_model_version_in_mlflow(
    ui: Ui, project: Any, first_round: dict[str, Any], tmp_path: Path, host: str
) -> None:
    """A user who has opened only the Dagster link follows the links of the asset."""
    address, mlflow = ui.url.replace("127.0.0.1", host), ui.mlflow_url.replace("127.0.0.1", host)
    entries = ui.metadata("policy_checkpoint", "r0001")
    name, version = Project.open(Home(project.home)).model_name, first_round["model_version"]
    shown = {"mlflow_run": "sampled_pass", "mlflow_model": f"Version {version}"}
    with browser(tmp_path / "profile") as tab:
        for label, words in shown.items():
            tab.open(f"{address}/assets/policy_checkpoint?view=partitions&partition=r0001&token={ui.token}")
            link = f"document.querySelector(`a[href='{entries[label]['url']}']`)"
            tab.wait_for(link)
            tab.run(f"{link}.target = '', {link}.click()")  # in this tab, which is the one that is watched
            tab.wait_for(f"location.href.startsWith('{mlflow}/#')")
            tab.wait_for(f"document.body.innerText.includes({words!r})")
            tab.picture(tmp_path / f"{label}.png")
        experiment = entries["mlflow_run"]["url"].partition("/runs/")[0].rpartition("/")[2]
        tab.open(f"{mlflow}/#/experiments/{experiment}")  # on its runs, not on MLflow's part for traces
        tab.wait_for(f"location.href.startsWith('{mlflow}/#/experiments/{experiment}/runs')")
    assert entries["mlflow_model"]["url"].endswith(f"/models/{name}/versions/{version}?workflowType={WORKFLOW}")
