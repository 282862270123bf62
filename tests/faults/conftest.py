"""A small disk that can really be full, and a project on paper."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rft_platform.common.digests import MANIFEST
from rft_platform.common.files import digest_file, write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.experience.record import RolloutRow
from rft_platform.rollout.recording.history import group_id, run_id
from rft_platform.rounds.project.project import Project
from tests.experience.samples import step_row


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of the given size (or resizes it), such as ``1m``; skips where this user may not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        options = f"remount,size={size}" if mounted else f"size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"needs the right to mount a small file system: {done.stderr.strip()}")
        mounted = True
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A started project of two rounds of 2 tasks x 2 runs; nothing has run yet."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "project": "paper",
        "name": "faults",
        "model": {"model_path": str(tmp_path / "base")},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 2,
            "total_steps": 2,
            "explorer_input": {"taskset": {"path": str(tasks), "judge": "exact_match"}},
        },
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    return Project.open(home)


def round_rows(project: Project, number: int = 1) -> list[RolloutRow]:
    """What an exploration of the project's round would have stored: answers "2" and "x" to each task."""
    return [_row(project, number, index, repeat) for index in range(len(project.tasks.tasks)) for repeat in range(2)]


def _row(project: Project, number: int, index: int, repeat: int) -> RolloutRow:
    run, answer = run_id(number, 0, index, repeat), "2x"[repeat]
    return step_row(
        run, 0, response_ids=[3, 4], rollout_logprobs=[-0.5, -0.25], prompt_ids=[1, 2], round=number, taskset="train",
        task_id=project.tasks.tasks[index].task_id, group_id=group_id(number, 0, index),
        response={"role": "assistant", "content": answer}, run_output=answer,
    )  # fmt: skip


def grown(row: RolloutRow, to: int) -> RolloutRow:
    """The row with an answer of so many random characters: what no compression makes smaller."""
    return replace(row, call=replace(row.call, response={"role": "assistant", "content": os.urandom(to // 2).hex()}))


@pytest.fixture
def make_checkpoint(project: Project) -> Callable[..., Path]:
    """Write a checkpoint folder with two files and the manifest that lists them."""

    def make(step: int) -> Path:
        folder = project.checkpoints / f"global_step_{step}"
        (folder / "trainer_state").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes([step]) * 4096)
        (folder / "trainer_state" / "optimizer.safetensors").write_bytes(bytes([step + 1]) * 8192)
        files = {
            file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": digest_file(file)}
            for file in folder.rglob("*.safetensors")
        }
        parent, request = folder.with_name(f"global_step_{step - 2}"), {"output": str(folder.parent)}
        described = {"policy_version": step, "parent_version": step - 2, "weights_digest": f"d{step}", "lineage": {}}
        write_sealed_json(folder / MANIFEST, {**described, "files": files, "parent": str(parent), "request": request})
        return folder

    return make
