"""`kvhold names`: a node knows the namespaces of its clients, what they are made of, and nothing
secret of them.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli.names import command as names_command
from kvhold.core.keys import Namespace
from kvhold.core.naming import MAX_DESCRIPTION_BYTES, Facts, unpack
from kvhold.net.messages import KnownSpace
from kvhold.node import NodeClient
from kvhold.node import names as limits
from kvhold.node.names import Names
from kvhold.testing.cache import PLAIN, a_prompt, store
from tests.node.nodes import RunningNode

ONE = Namespace(
    "content:1",
    PLAIN,
    facts=Facts.of({"vllm.dtype": "'float32'", "vllm.impl": "'auto'"}),
    title="/models/one",
)
TWO = replace(
    ONE,
    facts=Facts.of({"vllm.dtype": "'bfloat16'", "vllm.impl": "'auto'", "vllm.new": "1"}),
    title="/models/two",
)


def run(node: RunningNode, *arguments: str) -> Result:
    return CliRunner().invoke(names_command, [*arguments, "--socket", str(node.path)])


@pytest.fixture
def client(node: RunningNode) -> NodeClient:
    client = node.client()
    for space in (ONE, TWO):
        client.register(space)
    return client


def test_the_list_says_who_has_what_and_how_many_bytes(
    node: RunningNode, client: NodeClient
) -> None:
    store(client, a_prompt(ONE, 64))
    store(client, a_prompt(ONE.narrowed(cache_salt="salted"), 64))
    found = json.loads(run(node, "--json").stdout)
    spaces = {space["title"]: space for space in found["namespaces"]}
    assert spaces.keys() == {"/models/one", "/models/two"}
    assert spaces["/models/one"]["digest"] == ONE.digest.hex()
    assert spaces["/models/one"]["bytes"] > 0 == spaces["/models/two"]["bytes"]
    assert found["others"] == 1 and found["other_bytes"] > 0
    shown = run(node).stdout
    assert ONE.digest.hex()[:16] in shown and "/models/two" in shown and "1 more" in shown


def test_one_is_described_by_as_many_digits_as_no_other_has(
    node: RunningNode, client: NodeClient
) -> None:
    shown = run(node, ONE.digest.hex()[:8]).stdout
    for line in (
        "vllm.dtype = 'float32'",
        "model = 'content:1'",
        f"layout.tokens_per_chunk = {PLAIN.tokens_per_chunk}",
    ):
        assert line in shown.splitlines()
    unknown = run(node, "00" if ONE.digest[0] and TWO.digest[0] else "ff")
    assert unknown.exit_code == 1 and "no namespace" in str(unknown.exception)


def test_two_are_compared_fact_by_fact(node: RunningNode, client: NodeClient) -> None:
    digits = [ONE.digest.hex(), TWO.digest.hex()]
    found = json.loads(run(node, *digits, "--json").stdout)
    assert found["differences"] == {
        "vllm.dtype": ["'float32'", "'bfloat16'"],
        "vllm.new": [None, "1"],
    }
    shown = run(node, *digits).stdout
    assert "vllm.dtype" in shown and "vllm.impl" not in shown
    assert "the same namespace" in run(node, digits[0], digits[0]).stdout


def test_no_secret_is_in_a_description() -> None:
    facts = {
        "vllm.load_config.model_loader_extra_config": "{'endpoint': 'http://s3', "
        "'secret_access_key': 'hush'}",
        "environment.VLLM_SOME_API_KEY": "'hush'",
        "vllm.additional_config": "{'store': 'redis://:hush@host'}",
        "vllm.hf_config.bos_token_id": "1",
    }
    space = Namespace(
        "m",
        PLAIN,
        cache_salt="hush",
        tags=(("tenant", "hush"), ("app", "chat")),
        facts=Facts.of(facts),
    )
    found = unpack(space.description).facts
    assert "hush" not in repr(found)
    assert found["vllm.hf_config.bos_token_id"] == "1" and found["tag.app"] == "'chat'"
    others = unpack(
        replace(
            space, facts=Facts.of(facts | {"environment.VLLM_SOME_API_KEY": "'other'"})
        ).description
    ).facts
    assert others["environment.VLLM_SOME_API_KEY"] != found["environment.VLLM_SOME_API_KEY"], (
        "a difference is seen all the same"
    )


def test_a_description_is_bounded_whatever_the_facts() -> None:
    import random

    noise = random.Random(1)
    facts = {f"vllm.fact{i}": repr(noise.randbytes(1000).hex()) for i in range(500)}
    packed = Namespace("m", PLAIN, facts=Facts.of(facts)).description
    assert len(packed) <= MAX_DESCRIPTION_BYTES
    assert len(unpack(packed).facts) > 500


def known(names: Names) -> list[KnownSpace]:
    found: list[KnownSpace] = []
    more = True
    while more:
        page, more = names.page(found[-1].digest if found else b"", "")
        assert len(page) <= limits.PAGE_SPACES
        found += page
    return found


@pytest.mark.parametrize(("count", "size"), [(700, 10), (400, 60_000)])
def test_what_a_node_remembers_is_bounded(count: int, size: int) -> None:
    names = Names(clock=lambda: 1.0)
    for number in range(count):
        names.learn(number.to_bytes(16, "big"), "client", bytes(size))
    spaces = known(names)
    assert (
        len(spaces) <= limits.MAX_SPACES
        and sum(len(space.description) for space in spaces) <= limits.MAX_BYTES
    )
    assert spaces[-1].digest == (count - 1).to_bytes(16, "big"), "the latest stay"


def test_a_broken_description_is_an_error_that_says_so() -> None:
    from kvhold.core.errors import ProtocolError

    packed: Any = ONE.description
    for broken in (packed[:-4], b"junk", packed[:10] + b"x" + packed[11:]):
        with pytest.raises(ProtocolError):
            unpack(broken)
