"""Ask two questions about one long text: the second answer does not compute the text again.

python examples/transformers_reuse.py               # a small model with random weights
python examples/transformers_reuse.py MODEL         # a folder, or a name on the hub
python examples/transformers_reuse.py MODEL --node  # in this host's node
"""

import argparse
import inspect
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import kvhold
from kvhold.integrations.transformers import Reuse


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", nargs="?")
    options.add_argument(
        "--node",
        action="store_true",
        help="keep the KV in this host's node instead of this process",
    )
    options.add_argument("--tokens", type=int, default=2000, help="length of the text")
    asked = options.parse_args()

    model, questions = (
        with_random_weights(asked.tokens)
        if asked.model is None
        else pretrained(asked.model, asked.tokens)
    )
    with kvhold.connect() if asked.node else kvhold.open_cache(ram_bytes="512MiB") as cache:
        reuse = Reuse(model, cache)
        timed(model, questions[0][:, :16])  # the first call of a process is slow
        for number, question in enumerate(questions, start=1):
            plain_s, expected = timed(model, question)
            reuse_s, answer = timed(reuse, question)
            last = reuse.last
            print(
                f"question {number}: {last.num_tokens} tokens, {last.num_loaded} loaded, "
                f"{last.num_computed} computed"
            )
            print(
                f"  {plain_s:.2f} s without kvhold, {reuse_s:.2f} s with it, same tokens: "
                f"{torch.equal(answer, expected)}"
            )


def timed(model: Any, question: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return seconds, and the question with its answer, [1, tokens].

    model: a model, or a Reuse, which is called the same way
    """
    started = time.perf_counter()
    answer = model.generate(
        question, attention_mask=torch.ones_like(question), max_new_tokens=4, do_sample=False
    )
    return time.perf_counter() - started, answer


def with_random_weights(num_tokens: int) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=8000, max_position_embeddings=8192, **sizes)
    ).eval()
    text = torch.randint(3, 8000, (1, num_tokens))
    return model, [torch.cat([text, torch.randint(3, 8000, (1, 20))], dim=1) for _ in range(2)]


def pretrained(name: str, num_tokens: int) -> tuple[Any, list[torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(
        name, device_map="auto" if torch.cuda.is_available() else None
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    text = tokenizer(inspect.getsource(argparse), return_tensors="pt").input_ids[:, :num_tokens]
    asked = ["\n\nWhat does this module do?\n", "\n\nWhich classes does this module have?\n"]
    ends = [
        tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        for question in asked
    ]
    return model, [torch.cat([text, end], dim=1).to(model.device) for end in ends]


if __name__ == "__main__":
    main()
