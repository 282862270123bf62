"""The tokenizer of the models of the GPU benchmarks."""

import random
import time

import pytest
import shape_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rft_platform.recipes.tiny_model import build_tokenizer


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedTokenizerFast, float]:
    """The tokenizer, and the processor seconds of loading it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    shape_model.fill_vocabulary(folder / "tokenizer.json", shape_model.VOCABULARY)
    begin = time.process_time()
    return AutoTokenizer.from_pretrained(folder), time.process_time() - begin


def test_sampled_ids_decode_to_text_that_encodes_to_them(filled: tuple[PreTrainedTokenizerFast, float]) -> None:
    tokenizer, _ = filled
    assert len(tokenizer) == shape_model.VOCABULARY
    rng = random.Random(3)
    incomplete = {number for number in range(512) if "\ufffd" in tokenizer.decode([number])}  # a byte of a character
    left_out = incomplete | set(tokenizer.all_special_ids)
    for _ in range(50):
        sampled = (rng.randrange(shape_model.VOCABULARY) for _ in range(300))
        ids = [number for number in sampled if number not in left_out]
        assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids
    tags = tokenizer("<tool_call>{}</tool_call>")["input_ids"]
    assert tokenizer.decode(tags) == "<tool_call>{}</tool_call>"


def test_text_has_the_tokens_of_the_tiny_model(filled: tuple[PreTrainedTokenizerFast, float]) -> None:
    tokenizer, _ = filled
    for text in ("what is the sum of 12 and 7? " * 3, "Hello, World! äöü 世界\n\n  def f(x):\n    return x+1"):
        assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]


def test_it_loads_as_fast_as_the_tokenizer_of_a_real_model(filled: tuple[PreTrainedTokenizerFast, float]) -> None:
    """Engine and trainer load it several times when they start; 150,000 added tokens took more than 6 s each time."""
    assert filled[1] < 3
