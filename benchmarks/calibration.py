"""Constants of ``round_model.py`` from ``results/*.json``, and the measured rounds that verify them."""

import json
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from round_gpu import TASKS
from round_model import (
    BYTES,
    GPUS,
    UNLIMITED,
    Affine,
    Constants,
    Decoding,
    Prediction,
    Rows,
    Setup,
    Shape,
    Sharing,
    decode_seconds,
    engine_of,
    predict,
    rows_of,
    training_flops,
    training_seconds,
)
from scipy.optimize import brentq  # type: ignore[import-untyped]

RESULTS = Path(__file__).parent / "results"
EARLIER = "before_the_fix_of_the_update"
FOUR_B = "takes turns: full training of 4B on both GPUs (mode colocate, 2 ranks, engine on the first)"
FOUR_B_ADAPTER = "takes turns: LoRA rank 16 on 4B, one GPU"
EIGHT_B_ADAPTER = "takes turns: LoRA rank 16 on 8B, one GPU"
FOUR_B_AWAKE = "earlier: full training of 4B on both GPUs (mode colocate, 2 ranks, engine on the first)"
FOUR_B_ADAPTER_AWAKE = "earlier: LoRA rank 16 on 4B, one GPU"
FOUR_B_ADAPTER_MPS = "at the same time: LoRA rank 16 on 4B, one GPU with MPS, TRL beside it"


@cache
def result(name: str) -> Any:
    """The content of ``results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Measured:
    """A measured round: what it is compared as, and the seconds of its steady rounds (neither first nor last)."""

    name: str
    source: str  # file and key
    task: str
    setup: Setup
    seconds: float  # median
    calibrates: str = ""  # the constants that come from it; "": it only verifies
    not_covered: str = ""  # why the model is not expected to meet it


def steady(found: Any, key: str) -> float:
    """Median over the steady rounds: neither the first, which compiles, nor the last, which saves its state."""
    return statistics.median(float(each[key]) for each in found["rounds"][1:-1])


def split(found: Any, phase: str) -> float:
    """The same of a phase."""
    return statistics.median(float(each["split"][phase]) for each in found["rounds"][1:-1])


def later(found: Any, key: str) -> float:
    """Median of all rounds but the first, of a run whose last one is like the others."""
    return statistics.median(float(each[key]) for each in found["rounds"][1:] if each[key] is not None)


@cache
def measured() -> tuple[Measured, ...]:
    """Every measured steady round on one or two GPUs."""
    return (*_one_after_the_other(), *_beside_each_other(), *_larger())


def _one_after_the_other() -> list[Measured]:
    """0.6B on one GPU."""
    found, second = result("round_gpu"), result("round_gpu_second_look")["tasks"]
    h200, h100 = Setup("0.6b", "H200", saves=1), Setup("0.6b", "H100", saves=1)
    even, uneven = (found["tasks"][name]["medians"]["seconds"] for name in ("even", "uneven"))
    beside = {task: found[f"{task}_beside_the_peer"]["medians"]["seconds"] for task in ("even", "uneven")}
    free = replace(h100, saves=0)
    source, other = "round_gpu: tasks", "round_gpu_second_look: tasks"
    first = "decoding, MFU, judge, publish, deploy, rest, stall"
    return [
        Measured("even, one H200", source, "even", h200, even, first),
        Measured("uneven, one H200", source, "uneven", h200, uneven, "stall"),
        Measured("even, one H100", "round_gpu: even_beside_the_peer", "even", free, beside["even"]),
        Measured("uneven, one H100", "round_gpu: uneven_beside_the_peer", "uneven", free, beside["uneven"]),
        Measured("even, one H100, earlier version", other, "even", h100, second["even"]["seconds_median"]),
        Measured(
            "uneven, one H100, earlier version", other, "uneven", h100, statistics.median(second["uneven"]["seconds"])
        ),
    ]


def _beside_each_other() -> list[Measured]:
    """0.6B, exploration and training at the same time (``sync_offset: 1``)."""
    overlap = result("round_gpu_overlap")
    now, before = overlap["tasks"], overlap[EARLIER]["tasks"]
    mps = Setup("0.6b", "H200", overlap="mps", saves=1 / 3)
    h100 = Setup("0.6b", "H100", overlap="mps")
    apart, slices = replace(mps, overlap="apart", saves=1), replace(mps, overlap="time_slices", saves=1)
    even, uneven = (
        now[f"{task}, one GPU with MPS, trainer state saved every third round"]["medians"]["seconds"]
        for task in ("even", "uneven")
    )
    two_h100 = now["even, two H100, engine and trainer on one each"]["medians"]["seconds"]
    two_engines = now["uneven, one H100 with MPS and two engines"]["medians"]["seconds"]
    beside = {name: now[f"{name}, one H100 with MPS, TRL beside it"] for name in ("even", "uneven")}
    fp8 = "fp8 cache of keys and values"
    small_cache = now[f"uneven, one H100 with MPS, {fp8}"]["medians"]["seconds"]
    small_beside = now[f"uneven, one H200 with MPS, {fp8}, TRL beside it"]["medians"]["seconds"]
    newer = now[f"uneven, one H200 with MPS, {fp8}, vLLM 0.26"]["medians"]["seconds"]
    sampled = now[f"uneven, one of two H200 with MPS, {fp8}, TRL beside it"]["medians"]["seconds"]
    quiet = now[f"uneven, one of two H200 with MPS, {fp8}, training on the other"]["medians"]["seconds"]
    alone = now[f"uneven, one H200 with MPS, {fp8}, TRL right after"]["medians"]["seconds"]
    in_flight = now[f"uneven, one H200 with MPS, {fp8}, two batches in flight"]["medians"]["seconds"]
    free = before["even, one GPU with MPS, save_interval 100"]["medians"]["seconds"]
    two = before["even, two GPUs"]["medians"]["seconds"]
    even_turns = statistics.median(before["even, one GPU, turns"]["seconds"][1:-1])
    uneven_turns = before["uneven, one GPU"]["medians"]["seconds"]
    source, earlier = "round_gpu_overlap: tasks", f"round_gpu_overlap: {EARLIER}"
    return [
        Measured("even, offset 1, one H200, MPS, a save in three rounds", source, "even", mps, even),
        Measured("uneven, offset 1, one H200, MPS, a save in three rounds", source, "uneven", mps, uneven),
        Measured(
            "uneven, offset 1, one H100, MPS, two engines on it",
            source,
            "uneven",
            h100,
            two_engines,
        ),
        *(
            Measured(f"{name}, offset 1, one H100, MPS", source, name, h100, found["medians"]["seconds"], calibrating)
            for (name, found), calibrating in zip(beside.items(), ("", "MPS"), strict=True)
        ),
        Measured(
            "uneven, offset 1, one H100, MPS, fp8 cache",
            source,
            "uneven",
            h100,
            small_cache,
            not_covered="the model knows no fp8 cache",
        ),
        Measured("uneven, offset 1, one H200, MPS, fp8 cache", source, "uneven", replace(mps, saves=0), small_beside),
        Measured("uneven, offset 1, one H200, MPS, fp8 cache, vLLM 0.26", source, "uneven", mps, newer),
        Measured("uneven, offset 1, one of two H200, MPS, fp8 cache", source, "uneven", mps, sampled),
        Measured("uneven, offset 1, one of two H200, MPS, fp8 cache, again", source, "uneven", mps, quiet),
        Measured("uneven, offset 1, one H200, MPS, fp8 cache, nothing beside", source, "uneven", mps, alone),
        Measured("uneven, offset 1, one H200, MPS, fp8 cache, two in flight", source, "uneven", mps, in_flight),
        Measured("even, offset 1, one H200, MPS, no saves", earlier, "even", replace(mps, saves=0), free, "MPS"),
        Measured("even, offset 1, two H100", source, "even", Setup("0.6b", "H100", overlap="apart"), two_h100),
        Measured("even, offset 1, two H200", earlier, "even", apart, two),
        Measured("even, offset 1, one H200, time slices", earlier, "even", slices, even_turns, "time slices"),
        Measured("uneven, offset 1, one H200, time slices", earlier, "uneven", slices, uneven_turns, "time slices"),
    ]


def _larger() -> list[Measured]:
    """4B and 8B."""
    found = result("round_gpu_4b")
    adapter = Setup("4b", "H100", adapter=True, turns=True)
    setups = {
        FOUR_B_ADAPTER: adapter,
        FOUR_B: Setup("4b", "H100", ranks=2, turns=True),
        EIGHT_B_ADAPTER: replace(adapter, shape="8b"),
        FOUR_B_AWAKE: Setup("4b", "H100", ranks=2, checkpointing=True),
        FOUR_B_ADAPTER_AWAKE: replace(adapter, turns=False),
        FOUR_B_ADAPTER_MPS: Setup("4b", "H200", adapter=True, overlap="mps"),
    }
    setups = {
        run: replace(setup, cache_tokens=found[run].get("key_value_cache_tokens", UNLIMITED))
        for run, setup in setups.items()
    }

    def round_of(name: str, run: str, calibrates: str = "", not_covered: str = "") -> Measured:
        seconds = found[run].get("medians", {}).get("seconds") or later(found[run], "seconds")
        return Measured(name, f"round_gpu_4b: {run}", "even", setups[run], seconds, calibrates, not_covered)

    old = "one round of an early version, read from the log of a run that a time limit ended"
    slowed = "the constant of MPS is that of 0.6B, whose decoding leaves the GPU idle more often"
    return [
        round_of("4B LoRA, one H100", FOUR_B_ADAPTER, "LoRA, turns"),
        round_of("4B, two H100", FOUR_B, "MFU, publish, deploy, rest"),
        round_of("8B LoRA, one H100", EIGHT_B_ADAPTER),
        round_of("4B LoRA, offset 1, one H200, MPS", FOUR_B_ADAPTER_MPS, not_covered=slowed),
        round_of("4B, two H100, both awake, small cache", FOUR_B_AWAKE),
        round_of("4B LoRA, one H100, both awake, small cache", FOUR_B_ADAPTER_AWAKE, not_covered=old),
    ]


def rows(name: str) -> Rows:
    """The rows of a measured task."""
    return rows_of(TASKS[name])


@cache
def calibrate() -> Constants:
    """The constants. ``Measured.calibrates`` names the rounds that they come from; the others verify them."""
    small, four = result("round_gpu")["tasks"]["even"], result("round_gpu_4b")[FOUR_B]
    published, tokens = [BYTES * Shape.of(shape).weights for shape in ("0.6b", "4b")], rows("even").tokens
    computing = [tokens / found["medians"]["training_tokens_per_s"] for found in (small, four)]
    alone, two = (_variant(name)["step_seconds"] for name in ("plain", "plain_2_ranks"))
    judge_s = split(small, "judge") / len(rows("even").answers)
    constants = Constants(
        decoding=_decoding(),
        mfu_inverse=_mfu_inverse(computing, alone / (2 * two)),
        adapter_share=1,
        two_rank_share=alone / (2 * two),
        judge_s=judge_s,
        publish=_affine(published, [found["medians"]["save_s"] for found in (small, four)]),
        deploy=_affine(published, [found["medians"]["deploy_s"] for found in (small, four)]),
        rest=Affine(0, 0),
        turns_s=0,
        save_stall_s=_stall(),
        mps=Sharing(1, 1),
        time_slices=Sharing(1, 1),
    )
    adapter = _rounds_of("4B LoRA, one H100")
    seconds = tokens / result("round_gpu_4b")[FOUR_B_ADAPTER]["medians"]["training_tokens_per_s"]
    share = training_seconds(adapter.setup, rows("even"), constants) / seconds
    constants = replace(constants, adapter_share=share)
    rest, turns_s = _rest(constants, published)
    constants = replace(constants, rest=rest, turns_s=turns_s)
    constants = replace(constants, mps=_mps(constants))
    return replace(constants, time_slices=_time_slices(constants))


def _variant(name: str) -> Any:
    """The last measurement of a layout of the trainer: one and two ranks were measured in one call."""
    return [each for each in result("trainer_gpu")["results"] if each["variant"] == name][-1]


def _affine(sizes: list[int], seconds: list[float]) -> Affine:
    return Affine.through((sizes[0], seconds[0]), (sizes[1], seconds[1]))


def _rounds_of(name: str) -> Measured:
    return next(each for each in measured() if each.name == name)


def _decoding() -> Decoding:
    """One request alone gives the launch, the even round on one H200 the constant a row, 4B with LoRA the adapter's."""
    shape, gpu = Shape.of("0.6b"), GPUS["H200"]
    step = 1 / result("vllm_gpu")["tokens_per_second_ids"]["1"]
    launch = (step - BYTES * (shape.layer_weights + shape.head_weights) / gpu.bandwidth) / shape.layers
    small = split(result("round_gpu")["tasks"]["even"], "rollout")
    adapter = later(result("round_gpu_4b")[FOUR_B_ADAPTER], "rollouts_s")

    def row_error(row_s: float) -> float:
        return _rollouts("even, one H200", Decoding(launch, row_s)) - small

    row_s = float(brentq(row_error, 0, 1e-3))

    def adapter_error(more: float) -> float:
        return _rollouts("4B LoRA, one H100", Decoding(launch, row_s, more)) - adapter

    return Decoding(launch, row_s, float(brentq(adapter_error, -0.01, 0.1)))


def _rollouts(name: str, decoding: Decoding) -> float:
    each = _rounds_of(name)
    return decode_seconds(rows(each.task), engine_of(each.setup, decoding))


def _mfu_inverse(computing: list[float], two_rank_share: float) -> tuple[float, float]:
    """1 / MFU as a line over ``Shape.elementwise``, through 0.6B on one rank and 4B on two."""
    seen = []
    for name, speed, seconds in zip(("0.6b", "4b"), (1, 2 * two_rank_share), computing, strict=True):
        shape = Shape.of(name)
        seen.append((shape.elementwise, seconds * speed * GPUS["H200"].flops / training_flops(shape, rows("even"))))
    slope = (seen[0][1] - seen[1][1]) / (seen[0][0] - seen[1][0])
    return seen[0][1] - slope * seen[0][0], slope


def _stall() -> float:
    """Mean wait of a round for the trainer state that is written beside it: even and uneven rounds with a save each."""
    tasks = result("round_gpu")["tasks"]
    usual = split(tasks["even"], "overhead")
    waits = [each["split"]["overhead"] - usual for task in tasks.values() for each in task["rounds"][1:-1]]
    return statistics.mean(max(0.0, float(wait)) for wait in waits)


def _rest(constants: Constants, published: list[int]) -> tuple[Affine, float]:
    """What neither phase explains: a constant, a part by published bytes, and one of taking turns."""
    names = ("even, one H200", "4B, two H100", "4B LoRA, one H100")
    found = [_rounds_of(name) for name in names]
    left = [each.seconds - predict(replace(each.setup, saves=0), rows(each.task), constants).round for each in found]
    slope = (left[1] - left[2]) / published[1]
    floor = left[0] - slope * published[0]
    return Affine(floor, slope * 1e9), left[2] - floor


def _mps(constants: Constants) -> Sharing:
    """Speeds beside each other under MPS: means of an even run on an H200 and an uneven one on an H100.

    From the seconds of both phases, alone as predicted and beside each other as measured.
    """
    overlap = result("round_gpu_overlap")
    even = overlap[EARLIER]["tasks"]["even, one GPU with MPS, save_interval 100"]
    uneven = [each["split"] for each in overlap["tasks"]["uneven, one H100 with MPS, TRL beside it"]["rounds"][2:]]
    runs = [
        ("H200", "even", [statistics.median(even[name][1:-1]) for name in ("rollout_s", "train_s")]),
        ("H100", "uneven", [statistics.median(each[name] for each in uneven) for name in ("rollout", "train")]),
    ]
    speeds = []
    for gpu, task, (rollouts, both) in runs:  # training ends first
        alone = predict(Setup("0.6b", gpu), rows(task), constants)
        speeds.append(((alone.rollouts - (rollouts - both)) / both, (alone.training + alone.publishing) / both))
    explore, train = (statistics.mean(side) for side in zip(*speeds, strict=True))
    return Sharing(explore, train)


def _time_slices(constants: Constants) -> Sharing:
    """One speed for both sides, that leaves the even round as much too short as the uneven one too long."""
    seen = [each for each in measured() if each.setup.overlap == "time_slices"]

    def error(speed: float) -> float:
        tried = replace(constants, time_slices=Sharing(speed, speed))
        return sum(predict(each.setup, rows(each.task), tried).round / each.seconds - 1 for each in seen)

    speed = float(brentq(error, 0.2, 1.0))
    return Sharing(speed, speed)


def predictions() -> list[tuple[Measured, Prediction]]:
    """Each measured round beside its prediction."""
    constants = calibrate()
    return [(each, predict(each.setup, rows(each.task), constants)) for each in measured()]
