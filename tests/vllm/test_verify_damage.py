"""`kvhold verify` on a real vLLM: a connector that lies fails."""

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch in this environment")

from tests.vllm.verifying import verify

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with the plugin: one for all, so that they fork from one process."""
    folder = str(write_plugin(tmp_path_factory.mktemp("plugin")))
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("damage", "dtype"),
    [("bit", "float32"), ("block", "float32"), ("bit", "bfloat16"), ("block", "bfloat16")],
)
def test_a_loaded_block_that_is_damaged_on_the_way_fails(
    tmp_path: Path, plugin: str, damage: str, dtype: str
) -> None:
    environment = {"PYTHONPATH": plugin, "TEST_DAMAGE": damage}
    verified = verify(
        tmp_path,
        "--classes",
        "llama",
        "--paths",
        "plain",
        "--dtype",
        dtype,
        environment=environment,
    )
    row = verified.rows["llama", "plain"]
    assert verified.exit_code == 1, verified.output
    assert "kvhold verify: FAILED" in verified.output
    assert (row["outcome"], row["kv_exact"]) == ("FAIL", False), verified.output
    assert "1 of " in row["reason"]
    if damage == "block":
        assert row["tokens_equal"] is False, "without its KV an answer is another"


def test_a_connector_that_finds_nothing_fails(tmp_path: Path) -> None:
    verified = verify(
        tmp_path, "--classes", "llama", "--paths", "plain", "--config", '{"rules": {"load": false}}'
    )
    row = verified.rows["llama", "plain"]
    assert (verified.exit_code, row["outcome"], row["kv_exact"], row["tokens_equal"]) == (
        1,
        "FAIL",
        None,
        True,
    ), verified.output
    assert "no hit" in row["reason"]


def write_plugin(folder: Path) -> Path:
    """A plugin of vLLM's, as a folder for PYTHONPATH: the first block that is loaded is damaged
    after it was copied.
    """
    (folder / "damaging.py").write_text(
        """
import ctypes
import os


def register():
    from kvhold.integrations.vllm.worker import WorkerSide

    scatter, done = WorkerSide._scatter, []
    if scatter.__name__ == "damaging":
        return

    def damaging(self, load, shard, *arguments):
        damaged = scatter(self, load, shard, *arguments)
        view, there = self._views[shard][0], [block for block in load.block_ids[0] if block >= 0]
        if done or not there:
            return damaged
        done.append(True)
        address = int(view.table[0, 0]) + there[0] * view.block_stride
        if os.environ["TEST_DAMAGE"] == "bit":
            (ctypes.c_ubyte * 1).from_address(address)[0] ^= 1
        else:
            ctypes.memset(address, 0, view.group.block_bytes)
        return damaged

    WorkerSide._scatter = damaging
"""
    )
    information = folder / "damaging-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: damaging\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndamaging = damaging:register\n"
    )
    return folder
