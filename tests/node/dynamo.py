"""Dynamo's indexer (`ai-dynamo-runtime`), in a process of its own.

with DynamoIndexer() as indexer:
    indexer.follow(publisher.address, publisher.replay_address)
    indexer.blocks()    # {"host_pinned": {hash, ...}, "disk": {hash, ...}}
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from os import environ
from pathlib import Path
from typing import Any, Self

from tests.programs import reason_without
from tools.setup_env import dynamo_folder

FOLDER = dynamo_folder(Path(sys.prefix))
WHY_NOT = None if FOLDER.is_dir() else reason_without("ai-dynamo-runtime")
_WITHIN_S = 60.0  # only a hang takes so long


class DynamoIndexer:
    def __init__(self, folder: Path, *, block_size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._block_size = block_size
        self._log = folder / "indexer.log"
        command = [sys.executable, "-m", "dynamo.indexer", "--threads", "1"]
        command += ["--port", str(self._port), "--block-size", str(block_size)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ | {"PYTHONPATH": str(FOLDER)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        end_s = time.monotonic() + _WITHIN_S
        while True:
            try:
                self._call("/workers")
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    self.__exit__()
                    raise AssertionError(self._log.read_text()[-2000:]) from None
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def follow(self, publish: str, replay: str) -> None:
        answer = self._call(
            "/register",
            {
                "instance_id": 7,
                "endpoint": publish,
                "replay_endpoint": replay,
                "model_name": "m",
                "block_size": self._block_size,
            },
        )
        assert answer == {"status": "ok"}
        end_s = time.monotonic() + _WITHIN_S
        while self._call("/workers")[0]["status"] != "active":
            assert time.monotonic() < end_s, self._log.read_text()[-2000:]
            time.sleep(0.05)

    def blocks(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {"host_pinned": set(), "disk": set()}
        for event in self._call("/dump")["m:default"]["events"]:
            stored = event["event"]["data"]["stored"]["blocks"]
            found[event["storage_tier"]] |= {block["block_hash"] for block in stored}
        return found

    def matched_tokens(self, token_ids: list[int]) -> dict[str, int]:
        """Of a prompt: {"cpu": ..., "disk": ...}"""
        answer = self._call("/query", {"token_ids": token_ids, "model_name": "m"})
        found = answer["instances"].get("7", {})
        return {tier: int(found.get(tier, 0)) for tier in ("cpu", "disk")}

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
            return json.load(answer)
