"""Write docs/configuration.md: every key of rft.yaml with its type, default, constraints and meaning, from the schema.

``make configuration`` runs this. A test fails where the page is older than the schema, or a key has no description.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.names import REFUSED_REWARDS, REFUSED_WORKFLOWS, REWARDS, WORKFLOWS, Judge
from rft_platform.config.foreign.treatments import Moved, Noted, Treatment
from rft_platform.config.reference import default_of, is_list, keys, one_line, sections_of, type_of, written_name
from rft_platform.config.schema.rft_config import RftConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEADER = """# Configuration reference

This page lists every key of `rft.yaml`. `make configuration` generates it from the schema: do not edit this page. An
unknown key is refused, and the error names the most similar known key. `rft run --config rft.yaml --dry-run` shows the
settings that result from a file.

A value may contain `${oc.env:NAME,DEFAULT}`, an environment variable with an optional default, and `${section.key}`,
the value of another key of the file ([OmegaConf](https://omegaconf.readthedocs.io)). An expression without a value is
refused. The project stores the values: a later change of a variable does not change a started project. So a variable
whose name ends with `KEY` or `TOKEN` or with the word `PASS` or `PWD`, has the word `KEY` or `TOKEN`, or contains
`SECRET`, `PASSWORD` or `CREDENTIAL` is refused, and so is `RFT_ALERT_URL`: read it in your code, or name it in
`api_key_env`. A file of someone else may name any other variable: read it before you run it.

A file may have 256 KiB, 100,000 values (counted wherever an alias repeats them), 100 levels and numbers of 19 digits.
"""
FOREIGN = """
## Files of Trinity-RFT

A configuration file of Trinity-RFT loads as it is. Keys that are not listed above are renamed, or accepted with one
line in the plan that says what takes their place, or refused with the reason. `[]` stands for each entry of a list; the
keys of `taskset` hold for `tasksets[]` and `eval_tasksets[]`, too.

If a file has such a key or name, other than null and the `name` of an adapter, some keys that it leaves out have the
default of Trinity-RFT, and the plan has a line for each: `algorithm.algorithm_type` ppo,
`algorithm.optimizer.weight_decay` 0.01, `buffer.batch_size` 1, and of a taskset `format.prompt_key` prompt and
`format.response_key` response.

`stages` of one supervised fine-tuning and one training after it are one project: the first is its `warm_start`.
A file for Tinker trains a LoRA adapter on this machine. For `on_policy_distill` and `jsd` (here `gkd`), the first of
`explorer.auxiliary_models` is the teacher; for `mix`, the auxiliary buffer holds the demonstrations
(`algorithm.experts`).

| key | here |
|---|---|
"""
_REPEATED = ("buffer.explorer_input.tasksets[]", "buffer.explorer_input.eval_tasksets[]", "buffer.eval_tasksets[]")


def page() -> str:
    """The text of the page."""
    return HEADER + "".join(_section("", RftConfig, "", {})) + "".join(_foreign())


def _foreign() -> Iterator[str]:
    """The keys, workflows and rewards of Trinity-RFT's files."""
    yield FOREIGN
    for key, treatment in KEYS:
        if not key.startswith(_REPEATED):
            yield f"| {key} | {_cell(_treated(treatment))} |\n"
    yield "\n### Workflows and rewards\n\n| Trinity-RFT | here |\n|---|---|\n"
    for name, known in WORKFLOWS.items():
        held_out = f" (of eval_tasksets: `{known.eval_judge}`)" if known.eval_judge else ""
        yield f"| `{name}` | `workflow: {known.workflow}`{_judged(known.judge)}{held_out} |\n"
    for name, judge in REWARDS.items():
        yield f"| `{name}` | {_judged(judge).removeprefix(', ')} |\n"
    for name, reason in {**REFUSED_WORKFLOWS, **REFUSED_REWARDS}.items():
        yield f"| `{name}` | refused: {_cell(reason)} |\n"


def _treated(treatment: Treatment) -> str:
    if isinstance(treatment, Moved):
        same = not treatment.to.strip(".") or (treatment.to.startswith(".") and treatment.values)
        return "some values have other names" if same else f"`{treatment.to.removeprefix('.')}`"
    return f"no effect: {treatment.reason}" if isinstance(treatment, Noted) else f"refused: {treatment.reason}"


def _judged(judge: Judge | None) -> str:
    if judge is None:
        return ""
    if isinstance(judge, str):
        return f", `judge: {judge}`"
    return ", judges " + " + ".join(f"{part['weight']:g} `{part['judge']}`" for part in judge)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def undocumented() -> list[str]:
    """Keys without a description; sections are described by their class."""
    return [key for key, field in keys() if not field.description and not list(sections_of(field.annotation))]


def _section(key: str, section: type[BaseModel], meaning: str, written_as: dict[type[BaseModel], str]) -> Iterator[str]:
    """The heading and table of a section, and those of the sections in it; keys of a known section are not repeated."""
    inner = [(name, field, list(sections_of(field.annotation))) for name, field in section.model_fields.items()]
    plain = [(name, field) for name, field, sections in inner if not sections]
    if key:
        yield f"\n## `{key}`\n\n{one_line(meaning or section.__doc__ or '')}\n"
    if section in written_as:
        yield f"\nThe keys are those of `{written_as[section]}`.\n"
        return
    written_as[section] = key
    if plain:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in plain:
            cells = (type_of(field), default_of(field), one_line(field.description or ""))
            shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
            yield f"| `{written_name(name, field)}` | {shown} |\n"
    for name, field, sections in inner:
        written = f"{key}.{written_name(name, field)}".lstrip(".") + ("[]" if is_list(field.annotation) else "")
        for each in sections:
            yield from _section(written, each, field.description or "", written_as)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for missing in undocumented():
        print(f"{missing}: no description")
