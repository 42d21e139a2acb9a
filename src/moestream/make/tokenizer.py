"""A byte-level tokenizer for models with random weights: any text becomes tokens and comes back the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moestream.errors import UsageError

if TYPE_CHECKING:
    import gguf

_NORMAL, _CONTROL = 1, 3
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: A few merges, because llama.cpp's loader wants the list not to be empty.
_MERGES = ("Ġ t", "h e", "Ġ a", "i n")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMALLEST_VOCAB = 256 + len(_CONTROLS) + len(_MERGES)


def byte_letters() -> list[str]:
    """The letter GPT-2's byte-level encoding writes for each byte: printable ones themselves, others from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Add a gpt2-type tokenizer with ``vocab`` tokens: all bytes, control tokens, a few merges, made-up
    words.

    Raises UsageError when ``vocab`` has no room for the bytes.
    """
    if vocab < SMALLEST_VOCAB:
        raise UsageError(f"shape: vocab={vocab} has no room for the bytes; {SMALLEST_VOCAB} is the smallest")
    tokens = [*byte_letters(), *_CONTROLS, *(merge.replace(" ", "") for merge in _MERGES)]
    tokens += [f"Ġw{number}" for number in range(len(tokens), vocab)]
    controls = range(256, 256 + len(_CONTROLS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if number in controls else _NORMAL for number in range(vocab)])
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_eot_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)
