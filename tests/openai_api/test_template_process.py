"""Chat templates of strangers: they get limits, and their failure is the caller's error."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.common.errors import UserError
from rft_platform.openai_api.templates import ChatTemplate, TemplateProcess, template_process
from rft_platform.openai_api.tokenizer import PolicyTokenizer

MESSAGES = [{"role": "user", "content": "2+2?"}]
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**9 }}",
    "a large number": "{{ 10**(10**8) }}",
    "a padded text": "{{ '%1000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "replacement": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_within_its_limits_and_the_next_one_works(source: str) -> None:
    begun, before = time.monotonic(), psutil.Process().memory_info().rss
    with pytest.raises(UserError, match="chat template"):
        template_process().render(source, [MESSAGES], None, {})
    assert time.monotonic() - begun < 60  # 3 s of processor time, on a machine that may be busy
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert template_process().render("{{ messages[0].content }}", [MESSAGES], None, {}) == ["2+2?"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set x = messages[0].update({'a': 1}) %}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
    ],
)
def test_the_sandbox_is_immutable(source: str) -> None:
    with pytest.raises(UserError, match=r"SecurityError|UndefinedError"):
        template_process().render(source, [MESSAGES], None, {})


def test_it_renders_as_transformers_does(tiny_model: Path) -> None:
    tokenizer = PolicyTokenizer(tiny_model)
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "z": 1, "a": [2]}}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"b": 1.5, "a": "é\u2028<&>"}}}
    conversations: list[Any] = [
        MESSAGES,
        [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}],
    ]
    expected = [
        tokenizer.hf.apply_chat_template(each, tools=tools, add_generation_prompt=True, tokenize=False)
        for each in conversations
    ]
    assert ChatTemplate(tokenizer).texts(conversations, tools) == expected


def test_rendering_stays_fast(tiny_model: Path) -> None:
    template = ChatTemplate(PolicyTokenizer(tiny_model))
    template.check()
    begun = time.perf_counter()
    for _ in range(200):
        template.text(MESSAGES)
    assert (time.perf_counter() - begun) / 200 < 0.02


@pytest.mark.slow
def test_threads_share_it_and_it_ends_with_its_owner() -> None:
    owner = TemplateProcess()
    with ThreadPoolExecutor(8) as pool:
        asked = [[[{"content": str(number)}]] for number in range(20)]
        texts = list(pool.map(partial(owner.render, "{{ messages[0].content }}", tools=None, variables={}), asked))
    assert texts == [[str(number)] for number in range(20)]
    assert owner._child is not None
    worker = psutil.Process(owner._child.pid)
    assert worker.ppid() == os.getpid()
    del owner
    assert not psutil.pid_exists(worker.pid)
