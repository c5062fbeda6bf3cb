"""Keys are what docs/format.md says, today and in every release: committed keys, and a second maker
of keys written from the page.

python -m tests.core.test_key_vectors  # writes the vectors anew; a change means that no cache of
before is found again
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.keys import HASH_BYTES, Insert, Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.naming import Facts
from tests.codecs import independent

FILE = Path(__file__).parent / "vectors" / "keys.json"

DENSE: dict[str, Any] = {
    "tokens_per_chunk": 4,
    "tail_tokens": 1,
    "groups": [
        {
            "layers": 2,
            "planes": 2,
            "heads": 8,
            "head_dim": 128,
            "dtype": "bfloat16",
            "attention": "full",
            "window": 0,
        }
        | {"packing": "canonical", "block_tokens": 0, "block_bytes": 0, "rotary": ""}
    ],
}
HYBRID = {
    "tokens_per_chunk": 4,
    "tail_tokens": 2,
    "groups": [
        DENSE["groups"][0] | {"rotary": "yarn factor=4"},
        DENSE["groups"][0]
        | {"dtype": "float8_e4m3fn", "attention": "sliding", "window": 8}
        | {"packing": "engine-1.0-own", "block_tokens": 2, "block_bytes": 36},
    ],
}
PLAIN = {
    "model": "llama",
    "revision": "",
    "dtype": "",
    "quantization": "",
    "shards": 1,
    "lora": "",
    "cache_salt": "",
    "tags": [],
} | {"hashing": "tokens-1"}
FACTS = [["engine.seed", "7"], ["engine.dtype", "'bfloat16'"]]
FULL = {
    "model": "modèle/8B",
    "revision": "main",
    "dtype": "bfloat16",
    "quantization": "fp8",
    "shards": 2,
    "lora": "adapter-7",
} | {
    "cache_salt": "tenant a",
    "tags": [["team", "blue"], ["app", "chat"]],
    "hashing": "tokens-1",
}
INPUTS: list[dict[str, Any]] = [
    {
        "says": "two whole chunks",
        "layout": DENSE,
        "namespace": PLAIN,
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8],
        "extras": {},
    },
    {
        "says": "a tail of any length",
        "layout": DENSE,
        "namespace": PLAIN,
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "extras": {},
    },
    {
        "says": "less than a chunk",
        "layout": DENSE,
        "namespace": PLAIN,
        "tokens": [2147483647],
        "extras": {},
    },
    {
        "says": "all fields, two groups, tails at an engine's blocks, extras of the second chunk "
        "and of the tails, a negative token",
        "layout": HYBRID,
        "namespace": FULL,
        "tokens": [0, 1, 128000, -1, 5, 6, 7, 8, 9, 10, 11],
        "extras": {"1": "00ff", "2": "696d616765"},
    },
    {
        "says": "an insert that ends in the chunk after its first, a second beside it, text before "
        "and after them, a tail of text",
        "layout": DENSE,
        "namespace": PLAIN,
        "tokens": [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 8, 8, 13, 14, 15, 16, 17],
        "extras": {},
        "inserts": [[6, 4, {"text": "3f2a9c"}], [10, 2, {"hex": "00ff10"}]],
    },
    {
        "says": "tails at an engine's blocks, of which an insert touches the last, in a chunk with "
        "an extra; a long digest that is text",
        "layout": HYBRID | {"tokens_per_chunk": 8},
        "namespace": FULL,
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 11, 11, 12],
        "extras": {"1": "00ff"},
        "inserts": [[13, 1, {"text": "adaptér:" + "0123456789abcdef" * 4}]],
    },
    {
        "says": "one insert over a whole prompt of three chunks and a tail",
        "layout": DENSE,
        "namespace": PLAIN,
        "tokens": [9] * 14,
        "extras": {},
        "inserts": [[0, 14, {"hex": "ab" * 32}]],
    },
    {
        "says": "a budget for loss, which one bit of the digest shows",
        "layout": DENSE,
        "namespace": PLAIN | {"tags": [["kvhold.max_error", "0.02"], ["app", "chat"]]},
        "tokens": [1, 2, 3, 4, 5],
        "extras": {},
    },
    {
        "says": "another budget for loss",
        "layout": DENSE,
        "namespace": PLAIN | {"tags": [["kvhold.max_bits", "4.0"]]},
        "tokens": [1, 2, 3, 4],
        "extras": {},
    },
    {
        "says": "a span, which is approximate",
        "layout": DENSE,
        "namespace": PLAIN | {"is_of_spans": True},
        "tokens": [1, 2, 3, 4, 5],
        "extras": {},
    },
    {
        "says": "a span of a namespace with all fields",
        "layout": HYBRID,
        "namespace": FULL | {"facts": FACTS, "is_of_spans": True},
        "tokens": [1, 2, 3, 4, 5, 6],
        "extras": {},
    },
    {
        "says": "facts, in any order",
        "layout": DENSE,
        "namespace": PLAIN | {"facts": FACTS},
        "tokens": [1, 2, 3, 4],
        "extras": {},
    },
]


def prompt_of(inputs: dict[str, Any]) -> Prompt:
    layout = inputs["layout"]
    space = inputs["namespace"] | {"tags": tuple(map(tuple, inputs["namespace"]["tags"]))}
    space["facts"] = Facts.of(dict(space.get("facts", [])))
    groups = tuple(Group(**group) for group in layout["groups"])
    namespace = Namespace(
        layout=Layout(groups, layout["tokens_per_chunk"], layout["tail_tokens"]), **space
    )
    extras = {int(chunk): bytes.fromhex(extra) for chunk, extra in inputs["extras"].items()}
    return namespace.prompt(
        inputs["tokens"], extras, inserts=[Insert(*insert) for insert in inserts_of(inputs)]
    )


def inserts_of(inputs: dict[str, Any]) -> list[tuple[int, int, bytes | str]]:
    """Place and digest of each; the first vectors know of none."""
    return [
        (start, length, digest["text"] if "text" in digest else bytes.fromhex(digest["hex"]))
        for start, length, digest in inputs.get("inserts", [])
    ]


def by_kvhold(inputs: dict[str, Any]) -> dict[str, Any]:
    prompt = prompt_of(inputs)
    groups, shards = len(inputs["layout"]["groups"]), inputs["namespace"]["shards"]
    return {
        "layout_fingerprint": prompt.namespace.layout.fingerprint.hex(),
        "namespace_digest": prompt.namespace.digest.hex(),
        "hashes": [prompt.hash_at(chunk).hex() for chunk in range(prompt.num_whole)],
        "tail_lengths": list(prompt.tail_lengths),
        "tail_hashes": [
            prompt.tails[i : i + HASH_BYTES].hex() for i in range(0, len(prompt.tails), HASH_BYTES)
        ],
        "keys_of_the_first_chunk": [
            prompt.chunk_key(0, group, shard).hex()
            for group in range(groups)
            for shard in range(shards)
            if prompt.num_whole
        ],
    }


def by_the_page(inputs: dict[str, Any]) -> dict[str, Any]:
    layout, tokens = inputs["layout"], inputs["tokens"]
    extras = {int(chunk): bytes.fromhex(extra) for chunk, extra in inputs["extras"].items()}
    fingerprint = independent.layout_fingerprint(layout)
    namespace = independent.namespace_digest(inputs["namespace"], fingerprint)
    size, step = layout["tokens_per_chunk"], layout["tail_tokens"]
    whole, hashes, parent = len(tokens) // size, [], bytes(20)

    def touching(first: int, end: int) -> list[Any]:
        return [
            list(insert)
            for insert in inserts_of(inputs)
            if insert[0] < end and insert[0] + insert[1] > first
        ]

    for chunk in range(whole):
        first, end = chunk * size, (chunk + 1) * size
        parent = independent.chunk_hash(
            namespace, parent, tokens[first:end], extras.get(chunk, b""), touching(first, end)
        )
        hashes.append(parent)
    rest = tokens[whole * size :]
    tails = ([len(rest)] if rest else []) if step == 1 else list(range(step, len(rest) + 1, step))
    groups, shards = len(layout["groups"]), inputs["namespace"]["shards"]
    return {
        "layout_fingerprint": fingerprint.hex(),
        "namespace_digest": namespace.hex(),
        "hashes": [value.hex() for value in hashes],
        "tail_lengths": tails,
        "tail_hashes": [
            independent.chunk_hash(
                namespace,
                parent,
                rest[:n],
                extras.get(whole, b""),
                touching(whole * size, whole * size + n),
            ).hex()
            for n in tails
        ],
        "keys_of_the_first_chunk": [
            (
                namespace + hashes[0] + group.to_bytes(2, "little") + shard.to_bytes(2, "little")
            ).hex()
            for group in range(groups)
            for shard in range(shards)
            if hashes
        ],
    }


@pytest.mark.parametrize(
    "vector",
    json.loads(FILE.read_text()) if FILE.exists() else [],
    ids=lambda vector: vector["says"],
)
def test_keys_are_what_was_committed_and_what_the_page_says(vector: dict[str, Any]) -> None:
    assert by_kvhold(vector["inputs"]) == vector["gives"]
    assert by_the_page(vector["inputs"]) == vector["gives"]


def test_every_vector_is_committed() -> None:
    committed = [(vector["says"], vector["inputs"]) for vector in json.loads(FILE.read_text())]
    assert committed == [(inputs["says"], inputs) for inputs in INPUTS]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    table = [
        {"says": inputs["says"], "inputs": inputs, "gives": by_kvhold(inputs)} for inputs in INPUTS
    ]
    FILE.write_text(json.dumps(table, indent=1) + "\n")
