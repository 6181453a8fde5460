"""A model directory as the gateway needs it: tokenizer, chat template, size of the vocabulary."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from turnfold.history.render import TemplateRenderer
from turnfold.schemas.settings import SettingsError

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ModelDirectory(NamedTuple):
    """What was read."""

    name: str
    renderer: TemplateRenderer
    template: str
    vocab_size: int
    """Ids below this one have an embedding: most models have a few more than the tokenizer knows."""


def load_model_directory(path: str) -> ModelDirectory:
    """Read a Hugging Face model directory; weights are not needed.

    The tokenizer is taken from tokenizer.json as it stands: classes that rebuild it from a
    configuration tokenize some models differently. Raises SettingsError saying what is missing.
    """
    directory = Path(path)
    if not path or not directory.is_dir():
        raise SettingsError(
            f"model directory {path!r} does not exist: set TURNFOLD_MODEL or --model to the "
            "directory of the model that the engines serve"
        )
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise SettingsError(f"model directory {path} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    config = _read_json(directory / "tokenizer_config.json")
    template = _template(directory, config)
    renderer = TemplateRenderer(
        tokenizer,
        template,
        special_tokens=_special_tokens(config),
        today=datetime.datetime.now(datetime.UTC).date(),
    )
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    vocab_size = _vocab_size(_read_json(directory / "config.json")) or num_tokens
    return ModelDirectory(directory.resolve().name, renderer, template, vocab_size)


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Rows of the embedding; a model of several modalities says it of its text part."""
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None


def _template(directory: Path, config: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("tool_use") or by_name.get("default")
    if not isinstance(template, str):
        raise SettingsError(f"model directory {directory} has no chat template")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{file} is not valid JSON: {error}") from error
