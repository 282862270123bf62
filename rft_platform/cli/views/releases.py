"""Tables of versions and of the comparison of two versions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def versions_table(versions: list[dict[str, Any]]) -> "Table":
    """The versions with their scores and their share of the traffic."""
    from rich.table import Table

    table = Table("version", "round", "model version", "released", "traffic", "scores")
    for each in versions:
        scores = ", ".join(f"{name} {each['scores'][name]:.3f}" for name in list(each["scores"])[:2])
        traffic = each.get("traffic", 0)
        values = (each["version"], each["round"], each["model_version"] or "", "yes" if each["released"] else "no")
        table.add_row(*map(str, values), f"{traffic:.0%}" if traffic else "", scores)
    return table


def comparison_table(metrics: list[dict[str, Any]]) -> "Table":
    """The metrics of both versions, their difference, its interval and p value."""
    from rich.table import Table

    def number(value: float | None, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    table = Table("metric", "base", "candidate", "units", "difference", "95 % interval", "p")
    for each in metrics:
        interval = "" if each["low"] is None else f"{each['low']:+.4f} to {each['high']:+.4f}"
        table.add_row(
            each["metric"], number(each["base"]), number(each["candidate"]),
            f"{each['base_units']} / {each['candidate_units']}", number(each["difference"], "+.4f"), interval,
            number(each["p_value"], ".2g"),
        )  # fmt: skip
    return table
