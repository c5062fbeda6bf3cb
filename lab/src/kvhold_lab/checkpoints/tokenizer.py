"""An untrained tokenizer: ids 0 to 255 are bytes, then marks for images."""

from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
NUM_BYTES = 256
_MARKS = (
    "<|end|>",
    "<|pad|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
END_OF_TEXT_ID, PAD_ID, IMAGE_ID = range(NUM_BYTES, NUM_BYTES + 3)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ "
    "message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] "
    "}}{% else %}<image>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def save_tokenizer(folder: Path, *, max_model_len: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: token_id for token_id, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_MARKS))
    end, pad, image, *_ = _MARKS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        extra_special_tokens={"image_token": image},
        model_max_length=max_model_len,
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    return fast
