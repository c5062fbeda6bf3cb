"""Values in an InfiniStore server's memory, over RDMA.

The client is infinistore 0.2.35. Not tested on RDMA hardware. The server has no authentication.
"""

import os
from dataclasses import dataclass

from kvhold.core.errors import ConfigError, TierUnavailable
from kvhold.core.setting import setting, size
from kvhold.tiers.infinistore_blocks import HEAD_BYTES, BlockLayout, BlockTier, Connection
from kvhold.tiers.url import TierUrl

_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS")
_before = {name: os.environ.get(name) for name in _THREADS}
import infinistore  # noqa: E402

for _name, _value in _before.items():  # the import sets them to 1
    os.environ.pop(_name, None)
    if _value is not None:
        os.environ[_name] = _value


@dataclass(frozen=True)
class InfiniStoreConfig:
    host: str = setting("", "the server")
    port: int = setting(0, "the server's service port")
    device: str = setting("mlx5_0", "the RDMA device of this host")
    device_port: int = setting(1, "the device's port", minimum=1)
    link_type: str = setting("IB", "the network at the device's port", choices=("IB", "Ethernet"))
    prefix: str = setting(
        "kvhold", "before each key; tiers with different prefixes do not see each other"
    )
    block_bytes: int = size(
        256 << 10, "values are cut into blocks of this size; the last one is padded"
    )
    slot_bytes: int = size(4 << 20, "registered memory of one request; a whole number of blocks")
    slots: int = setting(16, "requests at once", minimum=1)


class InfiniStoreTier(BlockTier):
    def __init__(self, config: InfiniStoreConfig) -> None:
        if not config.host or not 0 < config.port < 65536:
            raise ConfigError("infinistore: write infinistore://host:port?device=mlx5_0")
        if (
            config.block_bytes < HEAD_BYTES
            or config.slot_bytes % config.block_bytes
            or not config.slot_bytes
        ):
            raise ConfigError(
                "infinistore: slot_bytes must be a multiple of block_bytes, and block_bytes "
                f"at least {HEAD_BYTES}"
            )
        self._config = config
        layout = BlockLayout(
            f"{config.prefix}/", config.block_bytes, config.slot_bytes, config.slots
        )
        super().__init__(layout, self._connect_client, f"{config.host}:{config.port}")

    @classmethod
    def from_url(cls, url: TierUrl) -> "InfiniStoreTier":
        hosts = url.hosts
        if len(hosts) != 1 or "@" in url.netloc or url.path.strip("/"):
            raise ConfigError(
                "infinistore: write infinistore://host:port?device=mlx5_0; it has no "
                "credentials and no path"
            )
        host, port = hosts[0]
        return cls(url.apply(InfiniStoreConfig(host=host, port=port or 0)))

    def _connect_client(self) -> Connection:
        config = self._config
        settings = infinistore.ClientConfig(
            host_addr=config.host,
            service_port=config.port,
            dev_name=config.device,
            ib_port=config.device_port,
            link_type=config.link_type,
            connection_type=infinistore.TYPE_RDMA,
        )
        client = infinistore.InfinityConnection(settings)
        connection: Connection = client.conn  # the Python wrapper leaks a buffer with each failure
        if client.conn.init_connection(settings) < 0:
            connection.close()
            raise TierUnavailable(
                self.traits.name, "connect", f"no server at {config.host}:{config.port}"
            )
        if client.conn.setup_rdma(settings) < 0:
            connection.close()
            raise TierUnavailable(
                self.traits.name,
                "connect",
                f"RDMA device {config.device} cannot be used with {config.host}:{config.port}",
            )
        return connection
