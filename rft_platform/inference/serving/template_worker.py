"""``python -m rft_platform.inference.serving.template_worker``: renders chat templates for ``template_process``.

A template comes with a model folder, so it is untrusted code. Jinja's sandbox prevents access to the interpreter, but
not endless loops or excessive use of memory. This process therefore has limits: the kernel kills the process when it
exceeds its processor time, and an allocation beyond the memory limit fails.

Reads one JSON request per line from standard input, writes one JSON answer per line to standard output, and ends when
its input is closed.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

CPU_SECONDS = 3.0  # processor time for one conversation
MEMORY_BYTES = 1 << 30  # in addition to the memory of the interpreter and its packages
TEXT_CHARACTERS = 64 << 20  # largest prompt


def main() -> None:
    """Answer requests until standard input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in sys.stdin.buffer:
        answer = _answer(json.loads(line), render_jinja_template)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(request: dict[str, Any], render: Any) -> dict[str, Any]:
    """``{"texts": [...]}`` or ``{"error": ...}`` for ``{"source", "variables", "conversations", "tools"}``."""
    texts = []
    try:
        for conversation in request["conversations"]:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            (text,), _ = render(
                [conversation],
                request["tools"],
                chat_template=request["source"],
                add_generation_prompt=request["add_generation_prompt"],
                **request["variables"],
            )
            if len(text) > TEXT_CHARACTERS:
                raise ValueError(f"the prompt has {len(text)} characters; at most {TEXT_CHARACTERS} are supported")
            texts.append(text)
    except Exception as error:  # the template's code may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"texts": texts}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
