"""The policy's tokenizer: text to ids and back, and the ids that end a completion."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json


class PolicyTokenizer:
    """A Hugging Face tokenizer that adds no special tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"model folder {folder}: no tokenizer can be loaded from it: {error}") from error
        self.end_ids = end_ids(folder, self.hf.eos_token_id)
        self._token_texts: dict[int, str] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ids: list[list[int]] = self.hf(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of one sequence, without special tokens."""
        text: str = self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence, without special tokens."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
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
