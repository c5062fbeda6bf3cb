"""The child's side of `kvhold_lab.engines.engine`: JSON lines in, JSON lines out.

One thread. The pipes move to other descriptors, so that an engine may print anything, and its
children inherit no pipe.
"""

import faulthandler
import logging
import os
import signal
import sys
from typing import BinaryIO, Protocol

import msgspec

from kvhold_lab.engines.messages import (
    EngineOptions,
    EngineRefusal,
    EngineStop,
    Generate,
    Generated,
    GeneratedMany,
    GenerateMany,
    Operation,
    Ready,
    Reply,
    Reset,
    ResetPrefixCache,
    Stopped,
)

_log = logging.getLogger(__name__)


class EngineDriver(Protocol):
    def ready(self) -> Ready:
        """Warm up, and describe the engine."""

    def generate(self, request: Generate) -> Generated:
        """Run one prompt, and wait for the connector's saves."""

    def generate_many(self, request: GenerateMany) -> GeneratedMany:
        """Run several prompts together."""

    def reset_prefix_cache(self) -> bool:
        """Return False if the engine refused."""

    def close(self) -> None:
        """Shut the engine down."""


def main() -> int:
    operations, replies = take_pipes()
    faulthandler.register(signal.SIGUSR1)
    lines = msgspec.json.Decoder(Operation)
    driver: EngineDriver | None = None
    for line in operations:
        try:
            operation = lines.decode(line)
            if isinstance(operation, EngineOptions):
                driver = _start(operation)
                reply: Reply = driver.ready()
            elif driver is None:
                reply = EngineRefusal(reason="the first operation must be start")
            else:
                reply = _run(driver, operation)
        # the parent gets the reason, the log the traceback
        except Exception as error:  # noqa: BLE001
            _log.exception("operation failed")
            reply = EngineRefusal(reason=f"{type(error).__name__}: {error}")
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
        if isinstance(reply, Stopped) or driver is None:
            return 0 if driver is not None else 1
    if driver is not None:
        driver.close()
    return 0


def _start(options: EngineOptions) -> EngineDriver:
    if options.driver == "vllm":
        from kvhold_lab.engines.vllm_engine import VllmDriver

        return VllmDriver(options)
    from kvhold_lab.engines.transformers_engine import TransformersDriver

    return TransformersDriver(options)


def _run(driver: EngineDriver, operation: Operation) -> Reply:
    match operation:
        case Generate():
            return driver.generate(operation)
        case GenerateMany():
            return driver.generate_many(operation)
        case ResetPrefixCache():
            return Reset(done=driver.reset_prefix_cache())
        case EngineStop():
            driver.close()
            return Stopped()
        case EngineOptions():
            return EngineRefusal(reason="started already")


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return stdin and stdout on other descriptors. The standard ones become empty and the log."""
    operations, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return operations, replies
