"""An engine joins only a node that has what its settings require, now and whenever it
joins again.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvhold.core.config import Config, EncryptionConfig, NodeConfig, load_config
from kvhold.core.errors import KVHoldError, NodeRefused, ProtocolError
from kvhold.core.requirements import Missing, Requirements, compare
from kvhold.net import messages as m
from kvhold.node import NodeClient, connect
from kvhold.node.requirements import pack, requirements_of, unpack
from kvhold.testing.cache import a_prompt, store
from tests.node.nodes import PATIENT, SPACE, RawClient, RunningNode, eventually, run_kvhold, works

StartNode = Callable[..., RunningNode]

PLAIN, SEALED = "redis://user:hush@h:1/0?token=hush", "redis://h:1/0?encrypt=true"


def settings(*tiers: str, **node: object) -> Config:
    return load_config({"tiers": list(tiers), "node": node}, environ={})


def missing(engine: Config, node: Config) -> Missing:
    return compare(requirements_of(engine), requirements_of(node))


class TestComparison:
    @pytest.mark.parametrize(
        ("engine", "node"),
        [
            ([], ["redis://h:1/0", "disk:///d"]),
            (["disk:///d"], ["redis://h:1/0", "disk:///d?max_bytes=5GiB&get_timeout_s=1"]),
            ([SEALED], [SEALED, "s3://b?encrypt=true"]),
            ([SEALED], [SEALED, "memory://?max_bytes=1GiB"]),
            ([SEALED, "disk:///d"], [SEALED, "disk:///d"]),
        ],
        ids=[
            "nothing is required",
            "other options",
            "another sealed one",
            "memory",
            "its own plain one",
        ],
    )
    def test_a_node_that_has_what_is_required_is_joined(
        self, engine: list[str], node: list[str]
    ) -> None:
        assert missing(settings(*engine), settings(*node)) == Missing()

    @pytest.mark.parametrize(
        ("engine", "node"),
        [
            ([SEALED], ["redis://h:1/0"]),
            ([SEALED], ["disk:///d"]),
            ([SEALED], [SEALED, "disk:///d"]),
            ([SEALED, "disk:///d"], [SEALED, "disk:///other"]),
            (
                ["s3://b?endpoint=http://x&encrypt=true", "s3://b?endpoint=http://y"],
                ["s3://b?endpoint=http://z"],
            ),
        ],
    )
    def test_one_that_would_store_in_clear_text_is_not(
        self, engine: list[str], node: list[str]
    ) -> None:
        (reason,) = missing(settings(*engine), settings(*node)).refused
        assert "is not encrypted" in reason
        assert "stored there in clear text" in reason

    def test_an_engine_may_require_encryption_of_every_tier(self) -> None:
        engine = settings(require_encryption=True)
        assert missing(engine, settings("disk:///d")).refused
        assert not missing(engine, settings("disk:///d?encrypt=true")).refused
        assert missing(
            settings("disk:///d", require_encryption=True), settings("disk:///d")
        ).refused, "even of its own"

    @pytest.mark.parametrize(
        ("engine", "node", "told"),
        [
            (["disk:///d"], [], "the node has no tier disk:///d"),
            (
                ["disk:///d?codec=lossless"],
                ["disk:///d"],
                "writes disk:///d with the codec raw, but this engine's settings say lossless",
            ),
            (["disk:///d"], ["disk:///d?encrypt=true"], "encrypts disk:///d"),
        ],
    )
    def test_what_else_differs_is_told(self, engine: list[str], node: list[str], told: str) -> None:
        found = missing(settings(*engine), settings(*node))
        assert found.refused == ()
        (different,) = found.different
        assert told in different

    def test_other_keys_are_told(self) -> None:
        def with_keys(*keys: str) -> Config:
            return Config(encryption=EncryptionConfig(keys=keys))

        assert missing(with_keys("=env:A"), with_keys("=env:B")).different == (
            "the node has other encryption.keys",
        )
        assert missing(with_keys("=env:A", "b=env:B"), with_keys("b=env:B", "=env:A")) == Missing()
        assert missing(Config(), with_keys("=env:A")) == Missing()

    def test_no_secret_is_in_them(self) -> None:
        engine = Config(
            tiers=(PLAIN, "audit+s3://b?secret_access_key=hush"),
            encryption=EncryptionConfig(keys=("=hush",)),
        )
        assert b"hush" not in pack(requirements_of(engine))
        assert "hush" not in str(missing(engine, Config()))

    def test_they_survive_the_wire_and_garbage_does_not(self) -> None:
        required = requirements_of(settings(SEALED, on_mismatch="refuse"))
        assert unpack(pack(required)) == required
        assert unpack(b"") == Requirements()
        for garbage in (b"x", b"\xc1", pack(required)[:-1], b"\x91\x05"):
            with pytest.raises(ProtocolError):
                unpack(garbage)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(os.urandom(32).hex())
    return tmp_path / "key"


def joined(node: RunningNode, config: Config) -> NodeClient:
    place = replace(config.node, socket=str(node.path), autostart=False)
    return connect(replace(config, node=place, client=PATIENT), name="engine")


def sealed_config(folder: Path, key: Path) -> Config:
    return Config(
        tiers=(f"disk://{folder}?encrypt=true&direct=never",),
        encryption=EncryptionConfig(keys=(f"=file:{key}",)),
    )


def test_an_engine_with_an_encrypted_tier_stores_nothing_through_a_node_without(
    start_node: StartNode, tmp_path: Path, key: Path
) -> None:
    node = start_node("--tier", f"disk://{tmp_path}/kv?direct=never")
    with pytest.raises(NodeRefused, match=r"kv is not encrypted.*End that node \(kvhold stop\)"):
        joined(node, sealed_config(tmp_path / "kv", key))
    with node.client() as other:
        assert other.status()["counters"]["kvhold_protocol_errors{reason=mismatch}"] == 1
    assert not list((tmp_path / "kv").rglob("??/*"))


def test_doctor_says_that_an_engine_with_these_settings_would_not_join(
    start_node: StartNode, tmp_path: Path, key: Path
) -> None:
    node = start_node("--tier", f"disk://{tmp_path}/kv?direct=never")
    sealed = sealed_config(tmp_path / "kv", key)
    (tmp_path / "k.toml").write_text(
        f'tiers = ["{sealed.tiers[0]}"]\nencryption.keys = ["{sealed.encryption.keys[0]}"]\n'
    )
    done = run_kvhold(
        "doctor", "--config", str(tmp_path / "k.toml"), KVHOLD_NODE_SOCKET=str(node.path)
    )
    assert done.returncode == 1
    assert "kv is not encrypted" in done.stdout


def test_the_node_is_compared_again_when_it_has_come_back(
    start_node: StartNode, tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sealed = sealed_config(tmp_path / "sealed", key)
    (tmp_path / "settings.toml").write_text(
        f'tiers = ["{sealed.tiers[0]}"]\nencryption.keys = ["{sealed.encryption.keys[0]}"]\n'
    )
    first = start_node("--config", str(tmp_path / "settings.toml"))
    with joined(first, sealed) as client:
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        assert client.flush()
        first.kill()
        eventually(lambda: not works(client))
        second = start_node("--tier", f"disk://{tmp_path}/plain?direct=never")
        eventually(lambda: "computing without the node" in caplog.text)
        assert not works(client)
        with pytest.raises(KVHoldError):
            store(client, a_prompt(SPACE, 64, 2))
        assert caplog.text.count("computing without the node") == 1, (
            "once, however often it is tried"
        )
        assert not list((tmp_path / "plain").rglob("??/*"))
        second.kill()
        start_node("--config", str(tmp_path / "settings.toml"))
        eventually(lambda: works(client))


def test_what_else_differs_is_warned_about_or_refused_as_the_setting_says(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), joined(node, Config(tiers=("disk:///d",))) as client:
        assert works(client)
    assert "the node has no tier disk:///d" in caplog.text
    with pytest.raises(NodeRefused, match="the node has no tier disk:///d"):
        joined(node, Config(tiers=("disk:///d",), node=NodeConfig(on_mismatch="refuse")))


def test_requirements_that_cannot_be_read_are_a_bad_hello(node: RunningNode) -> None:
    with RawClient(node.path) as raw:
        raw.say(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "raw", 1, b"\xc1"))
        answer = raw.hear()
        assert isinstance(answer, m.Refused)
        assert "the requirements cannot be read" in answer.reason
        assert raw.is_closed()


@pytest.mark.parametrize(
    ("codec", "max_error", "warned"),
    [("int8", None, True), ("int8", 0, True), ("int8", 0.1, False), ("lossless", None, False)],
)
def test_an_engine_is_warned_that_its_rules_do_not_allow_the_codec_of_its_tier(
    node: RunningNode,
    caplog: pytest.LogCaptureFixture,
    codec: str,
    max_error: float | None,
    warned: bool,
) -> None:
    config = load_config(
        {
            "tiers": [f"disk:///not/made?codec={codec}"],
            "rules": {"max_error": max_error},
            "node": {"socket": str(node.path), "autostart": False},
        },
        environ={},
    )
    connect(replace(config, client=PATIENT)).close()
    told = [line for line in caplog.messages if "loses precision" in line]
    assert len(told) == warned
    assert all(line.startswith("tier disk:///not/made: codec=int8") for line in told)
