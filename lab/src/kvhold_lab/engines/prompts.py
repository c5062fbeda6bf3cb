"""Text: the source of Python's standard library."""

import hashlib
import json
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 8_192
END_OF_TEXT = "<|endoftext|>"
_TRAINING_BYTES = 3_000_000
_CHAT_TEMPLATE = (
    "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)


@cache
def corpus() -> str:
    """Some 4.7 million characters. Raises FileNotFoundError."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))
    ]
    if sum(map(len, texts)) < _TRAINING_BYTES:
        raise FileNotFoundError(
            f"{folder} holds too little Python source to make a tokenizer and prompts from"
        )
    return "\n".join(texts)


@cache
def corpus_digest() -> str:
    return hashlib.sha256(corpus().encode()).hexdigest()[:32]


def train_tokenizer() -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = corpus()[:_TRAINING_BYTES].splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, *, max_model_len: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_prompt(
    model_path: Path, num_tokens: int, *, seed: int = 0, num_shared_tokens: int = 0
) -> list[int]:
    if not 0 <= num_shared_tokens <= num_tokens:
        raise ValueError(f"{num_shared_tokens} shared tokens do not fit a prompt of {num_tokens}")
    tokenizer = _load_tokenizer(model_path / "tokenizer.json")
    shared = _excerpt(tokenizer, num_shared_tokens, "shared")
    return shared + _excerpt(tokenizer, num_tokens - num_shared_tokens, f"seed {seed}")


def _excerpt(tokenizer: "Tokenizer", num_tokens: int, name: str) -> list[int]:
    text = corpus()
    place = random.Random(name).randrange(len(text))
    token_ids: list[int] = tokenizer.encode(f"# {hashlib.sha256(name.encode()).hexdigest()}\n").ids[
        1:
    ]
    num_characters = 5 * num_tokens + 100
    while len(token_ids) < num_tokens:
        piece = text[place : place + num_characters] or text[:num_characters]
        place = place + num_characters if place < len(text) else num_characters
        token_ids += tokenizer.encode(piece).ids
    return token_ids[:num_tokens]


@cache
def _load_tokenizer(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
