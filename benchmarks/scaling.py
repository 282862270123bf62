"""What rounds cost on 8, 64 and 1,000 GPUs, and what 1,000,000,000 rows cost: predicted from measured constants.

``python benchmarks/scaling.py`` compares the model with every measured round, simulates the clusters, and writes
``results/scaling.json`` and the figure of ``docs/scaling.md``. It measures one thing itself: the size of stored rows.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from calibration import calibrate, measured, predictions, result
from cluster_model import REMEDIES, Assumptions, ClusterRound, Workload, explored, improve
from store_project import of_round, template, write_rows

from rft_platform.experience.store import ExperienceStore

HERE = Path(__file__).parent
GPU_COUNTS = (8, 64, 1000)
ROWS = 10**9
LIMIT = 0.15  # of a predicted round
WORKLOADS = (
    Workload("one call a row", "uneven"),
    Workload("agents of 8 calls", "even", calls=8),
    Workload("4,096 rows a round", "uneven", rows=4096),
)
TRACE_LIMIT_S = 5.0
SAMPLE = 256  # rows whose size is measured


def compared() -> list[dict[str, Any]]:
    """Each measured round beside its prediction."""
    return [
        {
            "round": each.name,
            "source": each.source,
            "measured_s": round(each.seconds, 2),
            "predicted_s": round(found.round, 2),
            "error": round(found.round / each.seconds - 1, 3),
            "rollouts_s": round(found.rollouts, 2),
            "training_s": round(found.training + found.publishing, 2),
            "calibrates": each.calibrates,
            **({"not_covered": each.not_covered} if each.not_covered else {}),
        }
        for each, found in predictions()
    ]


def simulated(assumed: Assumptions) -> Iterator[dict[str, Any]]:
    """Every workload on every cluster: as the platform is, and after each change."""
    for work in WORKLOADS:
        for gpus in GPU_COUNTS:
            steps = [described(found, wait, assumed) for found, wait in improve(gpus, work, assumed)]
            yield {"workload": work.name, "gpus": gpus, "steps": steps}


def described(found: ClusterRound, wait: str, assumed: Assumptions) -> dict[str, Any]:
    """A simulated round; ``change`` removes ``largest_wait``."""
    rate = found.rows / found.round
    hours = ROWS / rate / 3600
    return {
        "engines": found.plan.engines,
        "rows": found.rows,
        "round_s": round(found.round, 1),
        "rows_per_s": round(rate, 1),
        "efficiency": round(found.efficiency, 3),
        "decoding_s": round(found.decoding, 1),
        "training_s": round(found.training, 1),
        "waits_s": {name: round(seconds, 1) for name, seconds in found.waits.items()},
        "largest_wait": wait or max(found.waits, key=lambda name: found.waits[name]),
        "change": REMEDIES[wait] if wait else None,
        "dollars_a_million_rows": round(found.plan.gpus * hours * assumed.dollars_a_gpu_hour / (ROWS / 1e6), 2),
        "days_for_all_rows": round(hours / 24, 1),
    }


def bytes_a_row(task: str) -> int:
    """Bytes of a stored row of ``task`` with random ids and log-probs, which barely compress, and without text."""
    rows, _ = explored(task, SAMPLE * 4, 1)
    random = np.random.default_rng(0)
    tables = template(random, SAMPLE, round(rows.prompts.mean()), round(rows.answers.mean()))
    with tempfile.TemporaryDirectory() as folder:
        store = ExperienceStore(Path(folder))
        write_rows(store, 1, *of_round(tables, random, 1, 1), 1)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.parquet"))
    return round(size / SAMPLE)


def stored(assumed: Assumptions, rows_a_round: int) -> dict[str, Any]:
    """The store with all rows; times grow with the rows, or with the rounds, from the largest that were measured."""
    size, many = result("store_at_size"), result("many_rounds")
    scale, queries = ROWS / size["settings"]["rows"], size["as written"]
    trace, start = queries["rft trace ROW_ID"]["median_s"], queries["rft trace ROUND"]["median_s"]
    tick = many["plan of a sensor tick, 10,000 rounds of notes only, load 10 to 12"]["warm"]
    each = bytes_a_row("uneven")
    return {
        "rows": ROWS,
        "rounds": round(ROWS / rows_a_round),
        "bytes_a_row": each,
        "terabytes": round(each * ROWS / 1e12, 1),
        "dollars_a_month": round(each * ROWS / 1e9 * assumed.dollars_a_gb_month),
        "sensor_tick_s": round(tick * ROWS / rows_a_round / 10_000, 3),
        "trace_of_a_row_s": round(start + (trace - start) * scale, 1),
        "millions_of_rows_at_which_a_trace_takes_5_s": round(
            (TRACE_LIMIT_S - start) / (trace - start) * size["settings"]["rows"] / 1e6
        ),
        "mean_reward_by_round_s": round(queries["mean_reward_by_round"]["median_s"] * scale),
        "check_s": round(size["upkeep"]["rft store check"]["median_s"] * scale),
        "compact_s": round(size["upkeep"]["rft store compact"]["median_s"] * scale),
    }


def report(assumed: Assumptions) -> dict[str, Any]:
    """The content of ``results/scaling.json``."""
    clusters = list(simulated(assumed))
    largest = next(each for each in clusters if each["workload"] == WORKLOADS[0].name and each["gpus"] == 1000)
    return {
        "what": "benchmarks/scaling.py: measured rounds beside the cost model's, and rounds that it predicts for an 8B "
        "model, full training, H100, exploration one round ahead. Only the first list was measured",
        "limit": LIMIT,
        "verified_by": [each.name for each in measured() if not each.calibrates and not each.not_covered],
        "rounds": compared(),
        "constants": asdict(calibrate()),
        "assumptions": asdict(assumed),
        "clusters": clusters,
        "store": stored(assumed, largest["steps"][-1]["rows"]),
    }


def tables(found: dict[str, Any]) -> tuple[str, str]:
    """The two tables of ``docs/scaling.md``: measured rounds, and clusters."""
    rounds = [
        "| round | measured, s | predicted, s | error | use |",
        "|---|---|---|---|---|",
        *(
            f"| {each['round']} | {each['measured_s']:.1f} | {each['predicted_s']:.1f} | {each['error']:+.0%} "
            f"| {_use(each)} |"
            for each in found["rounds"]
        ),
    ]
    clusters = [
        "| rows | GPUs | as it is: rows/s, GPU use | largest wait | after all changes: rows/s, GPU use "
        "| dollars a million rows, before and after |",
        "|---|---|---|---|---|---|",
    ]
    for each in found["clusters"]:
        first, last = each["steps"][0], each["steps"][-1]
        clusters.append(
            f"| {each['workload']} | {each['gpus']:,} | {_speed(first)} | {first['largest_wait']} | {_speed(last)} "
            f"| {first['dollars_a_million_rows']:,.0f} and {last['dollars_a_million_rows']:,.0f} |"
        )
    return "\n".join(rounds), "\n".join(clusters)


def _use(each: dict[str, Any]) -> str:
    if "not_covered" in each:
        return f"not covered: {each['not_covered']}"
    return f"calibrates: {each['calibrates']}" if each["calibrates"] else "verifies"


def _speed(step: dict[str, Any]) -> str:
    return f"{step['rows_per_s']:,.0f}; {step['efficiency']:.0%}"


def draw(found: dict[str, Any], picture: Path) -> None:
    """Rows a second of each workload: as it is, after each change, and 8 GPUs times the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "scaling", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(1, len(WORKLOADS), sharey=True, figsize=(11, 3.8), layout="constrained")
    for axis, work in zip(axes, WORKLOADS, strict=True):
        clusters = [each for each in found["clusters"] if each["workload"] == work.name]
        best = [each["steps"][-1]["rows_per_s"] for each in clusters]
        linear = [best[0] * gpus / GPU_COUNTS[0] for gpus in GPU_COUNTS]
        axis.plot(GPU_COUNTS, linear, color="#bab0ac", linestyle=":", label="linear from 8 GPUs")
        axis.plot(GPU_COUNTS, best, color="#54a24b", marker="o", label="after all changes")
        first = [each["steps"][0]["rows_per_s"] for each in clusters]
        axis.plot(GPU_COUNTS, first, color="#e45756", marker="o", label="as it is")
        for gpus, rate, each in zip(GPU_COUNTS, first, clusters, strict=True):
            above = gpus == GPU_COUNTS[1]
            side = "center" if above else "left" if gpus == GPU_COUNTS[0] else "right"
            axis.annotate(each["steps"][0]["largest_wait"], (gpus, rate), xytext=(0, 7 if above else -13),
                          textcoords="offset points", fontsize=7, ha=side)  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="GPUs", xticks=GPU_COUNTS, xticklabels=map(str, GPU_COUNTS))
        axis.minorticks_off()
        axis.set_ylim(bottom=12)
        axis.set_title(work.name, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("rows a second (predicted)")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Write the results and the figure, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scaling.json")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "images" / "scaling.svg")
    parser.add_argument("--dollars-a-gpu-hour", type=float, help="instead of the price in Assumptions")
    given = parser.parse_args()
    prices = {} if given.dollars_a_gpu_hour is None else {
        "dollars_a_gpu_hour": given.dollars_a_gpu_hour, "dollars_a_gpu_hour_source": "--dollars-a-gpu-hour"
    }  # fmt: skip
    found = report(Assumptions(**prices))
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, given.picture)
    print(*tables(found), sep="\n\n")


if __name__ == "__main__":
    main()
