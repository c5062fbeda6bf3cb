from typing import Protocol

from kvhold.node.forks import clients_of_process
from kvhold_lab.engines.messages import (
    CheckMemory,
    EngineOptions,
    Generate,
    Generated,
    GeneratedMany,
    GenerateMany,
    MemoryChecked,
    Operation,
    Ready,
)
from kvhold_lab.engines.protocol import (
    ChildReply,
    PrefixCacheReset,
    ResetPrefixCache,
    StopEngine,
    Stopped,
    serve,
)


class EngineDriver(Protocol):
    def ready(self) -> Ready:
        """Warm up, and describe the engine."""

    def generate(self, request: Generate) -> Generated:
        """Wait for the connector's saves, too."""

    def generate_many(self, request: GenerateMany) -> GeneratedMany: ...

    def reset_prefix_cache(self) -> bool:
        """False: refused."""

    def close(self) -> None: ...


def main() -> int:
    child = _Child()
    serve(Operation, child.do, is_last=lambda _: child.driver is None)
    if child.driver is not None:
        child.driver.close()
    return 0 if child.was_started else 1


class _Child:
    def __init__(self) -> None:
        self.driver: EngineDriver | None = None
        self.was_started = False

    def do(self, operation: Operation) -> ChildReply:
        if isinstance(operation, EngineOptions):
            assert self.driver is None, "started already"
            self.driver = _start(operation)
            self.was_started = True
            return self.driver.ready()
        assert self.driver is not None, "the first operation must be start"
        match operation:
            case Generate():
                return self.driver.generate(operation)
            case GenerateMany():
                return self.driver.generate_many(operation)
            case CheckMemory(enabled=enabled):
                clients = clients_of_process()
                for client in clients:
                    client.checks_memory = enabled
                return MemoryChecked(clients=len(clients))
            case ResetPrefixCache():
                return PrefixCacheReset(done=self.driver.reset_prefix_cache())
            case StopEngine():
                driver, self.driver = self.driver, None
                driver.close()
                return Stopped()


def _start(options: EngineOptions) -> EngineDriver:
    if options.driver == "vllm":
        from kvhold_lab.engines.vllm_engine import VllmDriver

        return VllmDriver(options)
    from kvhold_lab.engines.transformers_engine import TransformersDriver

    return TransformersDriver(options)
