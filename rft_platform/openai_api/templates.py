"""Render conversations through the chat template of a model, in a child process with limits of time and memory.

A template comes with a model folder, so it is untrusted code. Jinja's sandbox prevents access to the interpreter, but
not endless loops or excessive use of memory. One process renders all templates of a program. The first use starts it,
and so does the next use after a template has exceeded its limits.
"""

import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rft_platform.cluster.child import AnswerTimeoutError, CallError, Child, ChildError, LimitExceededError
from rft_platform.common.errors import EngineError, UserError
from rft_platform.openai_api.messages import Message, check_variables, normalised
from rft_platform.openai_api.tokenizer import PolicyTokenizer

LOG = logging.getLogger(__name__)
CPU_SECONDS = 3.0  # processor time for one conversation
MEMORY_MB = 1024  # in addition to the memory of the interpreter and its packages
TEXT_CHARACTERS = 64 << 20  # largest prompt
ANSWER_TIMEOUT_S = 120.0  # in wall time, for a process that gets no processor time and so never reaches that limit
_INVALID = ("TemplateSyntaxError", "TemplateAssertionError")  # errors of jinja2 when it compiles a template
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")  # variables without secrets


class ChatTemplate:
    """The chat template of an engine."""

    def __init__(
        self, tokenizer: PolicyTokenizer, source: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """``source``: a Jinja template instead of the tokenizer's; ``options``: default variables of the template."""
        self.tokenizer = tokenizer
        self.options = options or {}
        self.source: str | None = source or tokenizer.hf.chat_template

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text and default variables; empty for a model without a template."""
        options = json.dumps(self.options, sort_keys=True) if self.options else ""
        return hashlib.sha256((self.source + options).encode()).hexdigest() if self.source else ""

    def check(self) -> None:
        """As ``check_template``, with the variables of this model; a model without a template passes."""
        if self.source is not None:
            check_template(self.source, {**self.tokenizer.hf.special_tokens_map, **self.options})

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, with the generation prompt. ``options`` are variables of the template."""
        (text,) = self.texts([messages], tools, options)
        return text

    def texts(
        self,
        conversations: Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """As ``text``, for several conversations."""
        if self.source is None:
            raise UserError("the model has no chat template: send prompts to /v1/completions, or set a chat template")
        variables = {**self.tokenizer.hf.special_tokens_map, **self.options, **(options or {})}
        check_variables(variables)
        messages = [[normalised(message) for message in conversation] for conversation in conversations]
        return template_process().render(self.source, messages, tools or None, variables)

    def render(
        self, conversations: Sequence[Sequence[Message]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Prompt ids of each conversation."""
        return self.tokenizer.encode(self.texts(conversations, tools))


def load_template(source: str | None) -> str | None:
    """The text of the template ``source``, which is a file's path or the text itself."""
    if source is None or "{" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"chat template {source!r}: neither a file that can be read ({reason}) nor the text of a Jinja template; "
            "give the file's path, or a text with {{ ... }}"
        ) from error


def check_template(source: str, variables: Mapping[str, Any] | None = None) -> None:
    """Render a test question. Raises UserError if the text ``source`` is no Jinja template or exceeds its limits.

    ``variables``: those that the model's tokenizer gives to the template; None: they are not known yet.
    """
    try:
        template_process().render(source, [[{"role": "user", "content": "2+2?"}]], None, variables or {})
    except TemplateLimitError:
        raise
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, CallError) and cause.kind in _INVALID:
            raise UserError(f"the chat template is not valid Jinja: {cause.text}; correct it") from error
        if variables is not None:  # the template may require conversations of another form
            LOG.warning("the chat template refuses a plain question: %s", error)


class TemplateLimitError(UserError):
    """A template exceeded the limits of processor time or memory."""


class TemplateProcess:
    """Client of the rendering process; safe to share between threads. Requests are rendered one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None

    def start(self) -> None:
        """Start the process if none runs. Its imports take seconds, during which the caller can do other work."""
        with self._lock:
            self._running()

    def render(
        self,
        source: str,
        conversations: Sequence[Any],
        tools: Any,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """The text of each conversation under the template ``source``.

        Raises UserError if the template refuses the conversations or exceeds its limits, EngineError if the process
        fails for another reason.
        """
        arguments = (source, list(conversations), tools, dict(variables), add_generation_prompt)
        try:
            with self._lock:
                texts: list[str] = self._running().ask(
                    "render_all", *arguments, cpu_s=CPU_SECONDS, wall_s=ANSWER_TIMEOUT_S
                )
        except CallError as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error
        except (LimitExceededError, AnswerTimeoutError) as error:
            raise TemplateLimitError(
                f"the chat template did not render these messages within its limits ({error.how}): use shorter "
                "messages, or another template (chat_template)"
            ) from error
        except ChildError as error:
            raise EngineError(f"the process that renders chat templates failed: {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages and tools must be JSON values: {error}") from error
        return texts

    def _running(self) -> Child:
        if self._child is None or not self._child.is_alive:
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            renderer = "transformers.utils.chat_template_utils"
            self._child = Child(__name__, imports=[renderer], env=environment, memory_mb=MEMORY_MB)
        return self._child


@cache
def template_process() -> TemplateProcess:
    """The program's only instance."""
    return TemplateProcess()


os.register_at_fork(after_in_child=template_process.cache_clear)  # another thread may have held its lock


def render_all(
    source: str, conversations: list[Any], tools: Any, variables: dict[str, Any], add_generation_prompt: bool
) -> list[str]:
    """Render in the child process, with CPU_SECONDS for each conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = []
    for conversation in conversations:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        (text,), _ = render_jinja_template(
            [conversation], tools, chat_template=source, add_generation_prompt=add_generation_prompt, **variables
        )
        if len(text) > TEXT_CHARACTERS:
            raise ValueError(f"the prompt has {len(text)} characters; at most {TEXT_CHARACTERS} are supported")
        texts.append(text)
    return texts
