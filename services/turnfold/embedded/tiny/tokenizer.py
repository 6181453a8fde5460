"""A small byte-level BPE tokenizer for the toy task, with a Qwen-style chat template."""

from importlib import resources
from typing import TYPE_CHECKING, Any

from turnfold.embedded.tiny import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Left out of the text when a decode skips special tokens."""

MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""One token each, but kept in decoded text, as Qwen does: a tool-call parser needs them."""

VOCAB_SIZE = 400


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Train the tokenizer. Any text round-trips: the alphabet is the 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        ),
    )
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template()
    return tokenizer


def chat_template() -> str:
    """The text of `chat_template.jinja`, without the line break at its end."""
    return (
        resources.files("turnfold.embedded.tiny")
        .joinpath("chat_template.jinja")
        .read_text(encoding="utf-8")
        .rstrip("\n")
    )


def corpus() -> list[str]:
    """The texts that the tokenizer is trained on: everything that the toy task renders."""
    import json

    call = json.dumps({"name": task.TOOL_NAME, "arguments": {"door": "1"}})
    compact = json.dumps(
        {"name": task.TOOL_NAME, "arguments": {"door": "1"}}, separators=(",", ":")
    )
    texts = [
        "# Tools\n<tools>\n" + "\n".join(json.dumps(tool) for tool in task.TOOLS) + "\n</tools>",
        "system\n",
        "user\n",
        "assistant\n",
        task.question({"door": 1}),
        f"\n{call}\n",
        f"\n{compact}\n",
        "code 1",
        task.NO_SUCH_DOOR,
        "the code is 1",
    ]
    return texts * 20


def render(
    tokenizer: "PreTrainedTokenizerFast",
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
) -> list[int]:
    """Token ids of a conversation of the toy task, with its tool block."""
    ids = tokenizer.apply_chat_template(
        messages,
        tools=task.TOOLS,
        tokenize=True,
        return_dict=False,
        add_generation_prompt=add_generation_prompt,
    )
    return list(ids)
