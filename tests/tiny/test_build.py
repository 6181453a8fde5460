import json
from pathlib import Path
from typing import Any

import pytest
import torch

from turnfold.embedded.inference.engine import Engine
from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sampling import SamplingParams
from turnfold.embedded.inference.sequences import GenerationRequest, StopRules
from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.build import OutputDirectoryError, build, is_built
from turnfold.embedded.tiny.recipe import Recipe, digest
from turnfold.embedded.tiny.tokenizer import build_tokenizer, render

SHORT = Recipe(num_learn_steps=2, max_weaken_steps=2, conversations_per_step=4)
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tiny_model.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def short_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "short"
    assert build(directory, SHORT)
    return directory


def test_the_same_recipe_gives_the_same_bytes(short_dir: Path, tmp_path: Path) -> None:
    # A different state of torch's own random numbers and threads must not matter.
    torch.manual_seed(99)
    build(tmp_path / "again", SHORT)
    assert contents(tmp_path / "again") == contents(short_dir)


def test_another_seed_gives_another_model_with_the_same_tokenizer(
    short_dir: Path, tmp_path: Path
) -> None:
    other = Recipe(
        seed=1,
        num_learn_steps=SHORT.num_learn_steps,
        max_weaken_steps=SHORT.max_weaken_steps,
        conversations_per_step=SHORT.conversations_per_step,
    )
    build(tmp_path / "other", other)
    before, after = contents(short_dir), contents(tmp_path / "other")
    assert before["tokenizer.json"] == after["tokenizer.json"]
    assert before["model.safetensors"] != after["model.safetensors"]


def test_building_leaves_the_callers_random_numbers_and_threads_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    num_threads = torch.get_num_threads()
    build(tmp_path / "model", SHORT)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == num_threads


def test_a_finished_model_is_not_built_again(short_dir: Path) -> None:
    before = (short_dir / "model.safetensors").stat().st_mtime_ns
    assert is_built(short_dir, SHORT)
    assert not build(short_dir, SHORT)
    assert (short_dir / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    build(directory, SHORT)
    longer = Recipe(num_learn_steps=3, max_weaken_steps=0, conversations_per_step=4)
    assert not is_built(directory, longer)
    assert build(directory, longer)
    assert is_built(directory, longer)


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputDirectoryError, match="holds something else"):
        build(tmp_path, SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "model", SHORT, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_a_complete_hugging_face_model(short_dir: Path) -> None:
    assert set(contents(short_dir)) == FILES
    config = json.loads((short_dir / "config.json").read_bytes())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "float32"
    eos = json.loads((short_dir / "generation_config.json").read_bytes())["eos_token_id"]
    assert eos == build_tokenizer().eos_token_id == config["eos_token_id"]


def test_every_way_to_load_the_tokenizer_gives_the_same_ids(short_dir: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer.from_pretrained(short_dir)
    raw = Tokenizer.from_file(str(short_dir / "tokenizer.json"))
    trained: Any = build_tokenizer()
    for text in ("open door 3\n\n", '{"a":1}<tool_call>', "  naïve \t日本", "<|im_start|>user\n"):
        expected = trained.encode(text, add_special_tokens=False)
        assert auto.encode(text, add_special_tokens=False) == expected
        assert raw.encode(text, add_special_tokens=False).ids == expected
    assert auto.chat_template == trained.chat_template


def test_the_model_has_about_a_hundred_thousand_weights(short_dir: Path) -> None:
    model = SlotModel(short_dir, num_slots=1, max_len=8)
    assert 90_000 < sum(p.numel() for p in model.parameters().values()) < 150_000


def test_the_digest_changes_with_the_recipe() -> None:
    assert digest(Recipe()) == digest(Recipe())
    assert len({digest(Recipe()), digest(Recipe(seed=1)), digest(Recipe(weaken_rate=0.1))}) == 3


def test_progress_grows_to_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build(tmp_path / "model", SHORT, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (4, 4)


@pytest.mark.slow
def test_the_warmed_up_model_knows_the_format_and_is_mostly_wrong(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    build(directory, Recipe())
    tokenizer: Any = build_tokenizer()
    payloads = task.tasks(128, seed=0)
    rules = StopRules(eos_token_ids=(tokenizer.eos_token_id,))
    with Engine(SlotModel(directory, num_slots=32, max_len=256), rules) as engine:
        futures = []
        for seed, payload in enumerate(payloads):
            messages = [{"role": "user", "content": task.question(payload)}]
            prompt = tuple(render(tokenizer, messages, add_generation_prompt=True))
            params = SamplingParams(max_tokens=48, seed=seed)
            futures.append(
                engine.submit(
                    GenerationRequest(request_id=str(seed), prompt_ids=prompt, params=params)
                )
            )
        calls = [[t.token_id for t in future.result(60).tokens] for future in futures]
    doors = [called_door(tokenizer.decode(call)) for call in calls]
    num_right = sum(str(p["door"]) == d for p, d in zip(payloads, doors, strict=True))
    assert sum(door is not None for door in doors) > 0.7 * len(doors)
    assert 0.15 * len(doors) < num_right < 0.5 * len(doors)


def called_door(text: str) -> str | None:
    body = text.split("<tool_call>")[-1].split("</tool_call>")[0]
    try:
        return str(json.loads(body)["arguments"]["door"])
    except (ValueError, KeyError, TypeError):
        return None
