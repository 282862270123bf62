"""Dashboard, alert rules and the table of the docs: every metric and label they use exists."""

import json
import re
from collections.abc import Iterator

from rft_platform.servers.metrics.catalogue import CATALOGUE
from tests.deploy.files import DEPLOY, REPOSITORY, documents


def expressions() -> Iterator[str]:
    """Every PromQL expression of the dashboard and of the alert rules."""
    dashboard = json.loads((DEPLOY / "grafana" / "rft-platform.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_dashboard_and_alerts_use_metrics_and_labels_that_exist() -> None:
    used = set()
    for expression in expressions():
        for name, matchers in re.findall(r"\b(rft_\w+)(\{[^}]*\})?", expression):
            used.add(name)
            assert name in CATALOGUE, f"{name} in {expression}"
            labels = set(re.findall(r"(\w+)\s*(?:=~?|!=|!~)", matchers))
            assert labels <= set(CATALOGUE[name].labels), expression
            kind, rated = CATALOGUE[name].kind, re.search(rf"(rate|increase)\({name}\b", expression)
            assert (kind == "counter") == bool(rated) == name.endswith("_total"), f"{name} is a {kind}: {expression}"
        assert expression.count("(") == expression.count(")")
        assert "absent(" not in expression, f"absent() has no label instance to match on: {expression}"
    assert len(used) > 20
    assert len(set(CATALOGUE) - used) < 8, "most metrics should be on the dashboard"


def test_no_label_is_one_that_prometheus_sets() -> None:
    """Prometheus would rename it, and a rule that names it would read the scrape job's name."""
    for name, entry in CATALOGUE.items():
        assert not {"job", "instance"} & set(entry.labels), name


def test_rules_group_by_and_show_labels_that_their_metrics_have() -> None:
    for rule in documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"][0]["rules"]:
        names = re.findall(r"\brft_\w+", rule["expr"])
        known = {label for name in names for label in CATALOGUE[name].labels}
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        for group in re.findall(r"\bby \((.*?)\)", rule["expr"]):
            assert shown <= set(group.split(", ")) <= known, rule["alert"]
        assert shown <= known, rule["alert"]
    dashboard = json.loads((DEPLOY / "grafana" / "rft-platform.json").read_text())
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        names = re.findall(r"\brft_\w+", target["expr"])
        known = {label for name in names for label in CATALOGUE[name].labels} | {"instance"}
        assert set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))) <= known, target["expr"]


def test_an_online_project_that_waits_for_traffic_alerts_nobody() -> None:
    rules = {each["alert"]: each for each in documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"][0]["rules"]}
    (excepted,) = re.findall(r"unless on \(instance\) \((.*)\)\n", rules["RftNoProgress"]["expr"])
    assert excepted == 'rft_plan_state{state="waiting"} == 1 and on (instance) rft_project_info{online="true"}'


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana" / "rft-platform.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_table_of_the_docs_names_every_metric() -> None:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    assert set(re.findall(r"\brft_[a-z_]+\b", page)) - {"rft_platform"} == set(CATALOGUE)
