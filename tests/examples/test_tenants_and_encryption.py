"""One tenant finds nothing of another's, and nothing on the disk can be read without its key."""

import re

import pytest

from tests.examples.running import run_example

pytest.importorskip("cryptography", reason="no cryptography in this environment")


def test_one_tenant_cannot_read_what_another_stored() -> None:
    output = run_example("tenants_and_encryption.py")
    disk_bytes = re.search(r"the disk has (\d+) bytes", output)
    assert disk_bytes is not None
    assert int(disk_bytes[1]) > 2 * 128 * 2 * 2 * 2 * 64 * 4, "two sealed chunks"
    assert output.replace(disk_bytes[0], "the disk has N bytes").splitlines() == [
        "acme finds 256 tokens of its prompt",
        "other finds 0 tokens of the same prompt",
        "the disk has N bytes; acme's text in clear: False",
        "after a restart, acme finds 256 tokens",
        "with the other tenant's key, 0 tokens",
    ]
