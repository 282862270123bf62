"""``rft import``: turn traces of other tools into datasets. ``rft receive``: receive such traces from exporters."""

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.config.home import Home
    from rft_platform.traces.imports import ImportReport

_FORMATS = "langfuse, langsmith, mlflow or otel"
_NOUNS = {"tasks": "task", "demonstrations": "demonstration", "preferences": "preference pair"}


def import_traces(
    source: Annotated[
        str, typer.Argument(help="An exported file, a folder of them, or MLflow's tracking URI.", show_default=False)
    ],
    format: Annotated[str, typer.Option("--format", "-f", help=f"{_FORMATS}.", show_default=False)],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the import; one that exists is replaced. Default: the file's name, if it is free.",
        ),
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="MLflow: the experiment with the traces.")] = None,
    link: Annotated[str | None, typer.Option(help="Address of a trace's page, with {id} in place of its id.")] = None,
    score: Annotated[str | None, typer.Option(help="The score that compares answers, if there are several.")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Answers with a lower score, or without it, are no demonstrations.")
    ] = None,
    redact: Annotated[
        str | None,
        typer.Option(help="Your function from text to text (module:function); default: service.redaction."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Import traces of MLflow, OpenTelemetry, Langfuse or LangSmith as datasets below RFT_HOME/imports.

    The datasets are tasks, demonstrations for supervised fine-tuning, and preference pairs. A trace is imported once.
    """
    from dataclasses import asdict

    from rft_platform.common.redaction import visible
    from rft_platform.config.home import Home
    from rft_platform.run.console import output, print_json
    from rft_platform.traces.datasets import ScoreRule
    from rft_platform.traces.imports import ImportRequest, Imports, name_of, redaction_for

    home = Home.from_environment()
    score_rule = ScoreRule(score, min_score)
    request = ImportRequest(name or name_of(source), format, source, experiment, link, score_rule, not name)
    report = Imports(home).run(request, redaction_for(redact or _configured_redaction(home)))
    _tell_dagster(home)
    if as_json:
        print_json(asdict(report))
        return
    for line in _lines(report, home):
        output().print(visible(line), markup=False, soft_wrap=True)  # ids and reasons come from the traces


def receive(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 4318,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address that other machines reach needs a proxy in front.")
    ] = "127.0.0.1",
    redact: Annotated[
        str | None,
        typer.Option(help="Your function from text to text (module:function); default: service.redaction."),
    ] = None,
) -> None:
    """Receive spans from OpenTelemetry exporters (OTLP over HTTP) until Ctrl-C; `rft import` reads them.

    Exporters send `Authorization: Bearer TOKEN`; the token is RFT_WEB_TOKEN, or else the content of RFT_HOME/web_token.
    """
    from rft_platform.cluster.this_process import terminable
    from rft_platform.config.home import Home
    from rft_platform.observability.logs import configured
    from rft_platform.run.console import output, print_unmasked
    from rft_platform.run.start import use_home
    from rft_platform.servers.ports import Port, check_ports
    from rft_platform.servers.span_receiver import serve_receiver
    from rft_platform.traces.imports import redaction_for
    from rft_platform.web_guard.token import access_token

    home = Home.from_environment()
    use_home(home)
    redaction = redaction_for(redact or _configured_redaction(home))
    check_ports([Port(port, "rft receive", "--port")])
    token, console = access_token(home.web_token), output()

    def announce() -> None:
        for name, line in receiver_lines(home, host, port).items():
            print_unmasked(name, line)  # masking knows only that the exporter's variables hold a token

    try:
        with terminable(), configured("receiver"):
            serve_receiver(home, host, port, token, redaction, announce)
    except KeyboardInterrupt:
        pass
    console.print("stopped")


def receiver_lines(home: "Home", host: str, port: int) -> dict[str, str]:
    """What ``rft receive`` prints: its address, what an exporter's shell needs, and the command that imports the spans.

    The variables of the exporter say where the token is, and do not contain it.
    """
    from rft_platform.web_guard.token import TOKEN_VARIABLE

    kept = f"$(cat {shlex.quote(str(home.web_token))})"
    token = f"${TOKEN_VARIABLE}" if os.environ.get(TOKEN_VARIABLE) else kept
    address = f"http://{host}:{port}"
    return {
        "receiver": f"{address}/v1/traces",
        "exporter": f"export OTEL_EXPORTER_OTLP_ENDPOINT={address} "
        f'OTEL_EXPORTER_OTLP_HEADERS="Authorization=Bearer%20{token}"',
        "import": f"rft import {shlex.quote(str(home.received))} --format otel",
    }


def _configured_redaction(home: "Home") -> str | None:
    """``service.redaction`` of the project in the home, if it has one."""
    from rft_platform.config.load import load_config_of

    return load_config_of(home).service.redaction if home.config_file.exists() else None


def _tell_dagster(home: "Home") -> None:
    """Report the import to the project's Dagster instance; a project that starts later learns of it then."""
    if home.config_file.exists() and home.dagster.exists():
        from rft_platform.jobs.instance import open_instance
        from rft_platform.jobs.reconcile_imports import reconcile_imports

        with open_instance(home) as instance:
            reconcile_imports(home, instance)


def _lines(report: "ImportReport", home: "Home") -> list[str]:
    """What was imported, what was left out and why, and where the datasets are."""
    rows = ", ".join(_number(count, _NOUNS[kind]) for kind, count in report.rows.items())
    lines = [f"{_number(report.imported, 'trace')} imported as {report.name!r}: {rows}"]
    counted = {f"traces that the import {name!r} has already": count for name, count in report.known.items()} | {
        "traces that `rft forget` erased, not imported again": report.forgotten,
        "further records of a trace in the source": report.repeated,
        "traces that the redaction changed": report.redacted,
        "traces or records skipped": report.bad,
    }
    lines += [f"{what}: {count:,}" for what, count in counted.items() if count]
    lines += [f"  {bad.trace_id}: {bad.reason}" for bad in report.bad_traces]
    if report.score is None and report.scores:
        lines.append(f"no score compared answers: name one by --score ({', '.join(report.scores)})")
    return [*lines, *(f"{kind}: {home.imports / kind}" for kind, count in report.rows.items() if count)]


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"
