"""No model folder runs code or reaches the network: every call that loads one says so, so that nothing can ask."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rft_platform

PACKAGE = Path(rft_platform.__file__).parent
SAFE = {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True}


def loading_calls() -> Iterator[tuple[str, ast.Call]]:
    """(class and method, call) of each ``X.from_pretrained`` and ``X.from_config`` of the platform."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("from_pretrained", "from_config")
                and isinstance(node.func.value, ast.Name)
            ):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno} {node.func.value.id}.{node.func.attr}", node


CALLS = dict(loading_calls())


def needed(call: str) -> set[str]:
    """What a call must say; peft reads no code, and takes safetensors where there are any (``read_headers`` looks)."""
    if "PeftModel" in call:
        return {"local_files_only"}
    if call.endswith("from_config"):
        return {"trust_remote_code"}
    return {"trust_remote_code", "local_files_only"} | ({"use_safetensors"} if "AutoModel" in call else set())


@pytest.mark.parametrize("call", CALLS)
def test_a_model_folder_is_loaded_without_its_code(call: str) -> None:
    given = {
        keyword.arg: keyword.value.value
        for keyword in CALLS[call].keywords
        if keyword.arg in SAFE and isinstance(keyword.value, ast.Constant)
    }
    assert {name: SAFE[name] for name in needed(call)} == {name: given.get(name) for name in needed(call)}


def test_the_calls_are_found() -> None:
    assert len(CALLS) >= 8
    assert not [
        str(file)
        for file in PACKAGE.rglob("*.py")
        if "projects" not in file.parts  # a user's project renders the template of its own model
        and ".apply_chat_template(" in file.read_text(encoding="utf-8")  # template_process renders within limits
    ]
