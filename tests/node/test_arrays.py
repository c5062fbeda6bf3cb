"""`store` and `load` over a node, whose arena clients can only read."""

import numpy as np

from kvhold import Group, Layout, Namespace
from tests.node.nodes import RunningNode, eventually

SPACE = Namespace("arrays", Layout((Group(3, 2, 2, 8, "float32"),), tokens_per_chunk=16))


def test_what_one_client_stores_another_loads(shared_node: RunningNode) -> None:
    prompt = SPACE.prompt(np.arange(90, dtype=np.int32))
    kv = np.random.default_rng(1).standard_normal((3, 2, 90, 2, 8), np.float32)
    with shared_node.client() as client, shared_node.client() as other:
        assert client.store(prompt, [kv]) == 90
        found = other.load(prompt)
        assert found.num_tokens == 90
        assert np.array_equal(found.kv[0], kv)
        nothing = {"tickets": 0, "leases": 0, "reservations": 0}
        eventually(lambda: client.status()["held"] == nothing)
