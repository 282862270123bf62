"""The policy's tokenizer: text to ids and back, the ids that end a completion, and checks of a prompt's length.

Both engines use the same checks, so their refusals are the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json
from rft_platform.openai_api.errors import ContextLengthError
from rft_platform.openai_api.parsers import TAGS

MAX_CHARACTERS_A_TOKEN = 64  # on average over a prompt; tokens have about 4, long runs of spaces up to 128


class PolicyTokenizer:
    """A Hugging Face tokenizer that adds no special tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"model folder {folder}: no tokenizer can be loaded from it: {error}") from error
        special = {id_: str(token) for id_, token in self.hf.added_tokens_decoder.items() if token.special}
        shown = {id_ for id_, text in special.items() if text in TAGS}
        #: Ids without text, if the tokenizer calls a tag special: the parser must see tags. None: all special ones.
        self._hidden = special.keys() - shown if shown else None
        self.end_ids = end_ids(folder, self.hf.eos_token_id)
        self._token_texts: dict[int, str] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ids: list[list[int]] = self.hf(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of one sequence, without special tokens."""
        return self.decode_many([ids])[0]

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence, without special tokens."""
        if self._hidden is not None:
            sequences = [[token for token in ids if token not in self._hidden] for ids in sequences]
        options = {"skip_special_tokens": self._hidden is None, "clean_up_tokenization_spaces": False}
        texts: list[str] = self.hf.batch_decode(sequences, **options) if sequences else []
        return texts

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each single token, including special tokens."""
        for token in set(ids) - self._token_texts.keys():
            self._token_texts[token] = self.hf.decode([token], clean_up_tokenization_spaces=False)
        return [self._token_texts[token] for token in ids]


def end_ids(folder: Path, eos_token_id: int | None) -> list[int]:
    """Ids that end a completion: those of ``generation_config.json`` (one or several) and ``eos_token_id``."""
    config = folder / "generation_config.json"
    eos_ids = read_json(config).get("eos_token_id") if config.exists() else None
    ids = set(eos_ids if isinstance(eos_ids, list) else [eos_ids]) | {eos_token_id}
    return sorted(token for token in ids if token is not None)


def check_text(text: str, max_model_len: int) -> None:
    """Raise ContextLengthError, before tokenising, for a text that no tokenizer could fit into the context."""
    limit = MAX_CHARACTERS_A_TOKEN * max_model_len
    if len(text) > limit:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters; at most {limit} can fit the model's context of "
            f"{max_model_len} tokens"
        )


def check_ids(ids: Sequence[int], limit: int, max_model_len: int, vocabulary: int, why: str = "") -> None:
    """Raise an error unless ``ids`` has 1 to ``limit`` tokens, each in [0, ``vocabulary``)."""
    if not ids:
        raise UserError("the prompt is empty; expected at least one token")
    if set(map(type, ids)) != {int}:
        raise UserError("token ids must be whole numbers")
    if len(ids) > limit:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens; between 1 and {limit} fit the model's context of "
            f"{max_model_len} tokens{why}"
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise UserError(f"token ids must lie between 0 and {vocabulary - 1}: got {min(ids)} to {max(ids)}")


def check_prompt(ids: Sequence[int], max_model_len: int, vocabulary: int) -> None:
    """Check ``ids`` as ``check_ids`` does; the prompt must also leave room to sample at least one token."""
    check_ids(ids, max_model_len - 1, max_model_len, vocabulary, "; nothing could be sampled after it")
