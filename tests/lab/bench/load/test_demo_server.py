"""The settings of a demo server's node, on a cache in this process."""

from pathlib import Path

import numpy as np
import pytest

from kvhold.cache.local import LocalCache
from kvhold.core.config import load_config
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold_lab.bench.load.demo_server import connector_of

MIB = 1 << 20
GROUP = Group(layers=1, planes=1, heads=1, head_dim=MIB // 8, dtype="uint8")
SPACE = Namespace("demo", Layout((GROUP,), tokens_per_chunk=1, tail_tokens=0))


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_the_disk_has_what_memory_has_not(tmp_path: Path, policy: str) -> None:
    connector = connector_of(tmp_path, ram_bytes=4 * MIB, disk_bytes=64 * MIB, policy=policy)
    config = load_config(connector["kv_connector_extra_config"], environ={})
    with LocalCache(config) as cache:
        cache.register(SPACE)
        for first in range(0, 70, 10):  # 42 chunks; memory has room for 32
            prompt = SPACE.prompt(np.arange(first, first + 6, dtype=np.int32))
            with cache.lookup(prompt.query()) as hit:
                assert not hit.num_tokens
            with cache.reserve(SPACE.layout, prompt.chunks()) as reservation:
                assert cache.flush(reservation.commit(), deadline_s=30.0)
        prompt = SPACE.prompt(np.arange(6, dtype=np.int32))
        with cache.lookup(prompt.query()) as hit:
            assert hit.sources == {"disk": 6}


def test_without_a_size_there_is_no_disk(tmp_path: Path) -> None:
    settings = connector_of(tmp_path, ram_bytes=MIB)["kv_connector_extra_config"]
    assert load_config(settings, environ={}).tiers == ()
