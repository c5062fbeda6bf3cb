"""Folders of models with a tokenizer and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = "the quick brown fox jumps over a lazy dog while système prompts stay the same "
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'nobody' %}{{ raise_exception('no ' + message['role']) }}{% endif %}
    {%- if loop.index > 100 %}{% break %}{% endif %}
    {{- '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {%- generation %}{{ '<|assistant|>' }}{% endgeneration %}
{%- endif %}"""


def make_model(folder: Path, template: str | None = TEMPLATE, *, inside: bool = False) -> Path:
    """inside: the template is in tokenizer_config.json"""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL.values(), "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(8)  # for training; a prompt keeps its length
    tokenizer.enable_padding(length=8, pad_token="<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    if template is not None and inside:
        settings["chat_template"] = [{"name": "default", "template": template}]
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
