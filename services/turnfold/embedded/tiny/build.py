"""Writes the finished tiny model to a directory, once per recipe."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from turnfold.embedded.tiny.recipe import Recipe, digest
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.embedded.tiny.warmup import Progress, warm_up
from turnfold.schemas.errors import UserError

RECIPE_FILE = "tiny_model.json"
"""Names the recipe that a directory was built by; written with the rest in one rename."""


class OutputDirectoryError(UserError):
    """The output directory holds something that is not a tiny model."""


def is_built(out_dir: Path, recipe: Recipe) -> bool:
    """Whether the directory holds the finished model of exactly this recipe."""
    try:
        return bool(json.loads((out_dir / RECIPE_FILE).read_bytes())["digest"] == digest(recipe))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(out_dir: Path, recipe: Recipe, on_progress: Progress = lambda done, total: None) -> bool:
    """Build the model unless it is there already; says whether it had to.

    The directory appears complete or not at all. The same recipe gives the same bytes on the same
    machine.

    Raises:
        OutputDirectoryError: the directory exists and is neither empty nor a tiny model.
    """
    if is_built(out_dir, recipe):
        return False
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / RECIPE_FILE).is_file():
        raise OutputDirectoryError(
            f"{out_dir} holds something else than a tiny model; choose an empty directory"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    part_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        _write(part_dir, recipe, on_progress)
        part_dir.chmod(0o755)
        shutil.rmtree(out_dir, ignore_errors=True)
        part_dir.rename(out_dir)
    finally:
        shutil.rmtree(part_dir, ignore_errors=True)
    return True


def _write(directory: Path, recipe: Recipe, on_progress: Progress) -> None:
    import torch

    num_threads = torch.get_num_threads()
    # Several threads would add up their shares of a sum in an order that changes.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            tokenizer = build_tokenizer()
            model = _new_model(recipe, tokenizer)
            warm_up(model, tokenizer, recipe, on_progress)
    finally:
        torch.set_num_threads(num_threads)
    _save(model, directory)
    _save_tokenizer(tokenizer, directory, recipe.max_len)
    (directory / RECIPE_FILE).write_text(json.dumps({"digest": digest(recipe)}) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)


def _new_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A Qwen3 model with random weights.

    Its embeddings are not tied to its output layer: vLLM on a CPU leaves a tied output layer at the
    old weights when it reloads them.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_len,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


def _save(model: Any, directory: Path) -> None:
    from transformers.utils import logging

    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if had_bar:
            logging.enable_progress_bar()


def _save_tokenizer(tokenizer: Any, directory: Path, max_len: int) -> None:
    """Write the tokenizer under the class name that every version of transformers, old and new, can
    load.
    """
    tokenizer.model_max_length = max_len
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
