"""Puts, probes, reads, checks and deletes a test chunk in each tier."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import click

from kvhold.cache.loss import loss_warning
from kvhold.cli.lmcache import advice
from kvhold.cli.status import describe_control
from kvhold.cli.tier_urls import check_no_secrets
from kvhold.codecs import Raw, frame_chunk, unframe_chunk
from kvhold.core.config import Config, load_config
from kvhold.core.errors import (
    ConfigError,
    FrameError,
    KVHoldError,
    NodeError,
    TierError,
    TierUnavailable,
)
from kvhold.core.keys import HASH_BYTES, Namespace, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.status import check_status
from kvhold.net.login import quoted
from kvhold.node import NodeClient
from kvhold.node.paths import socket_path
from kvhold.node.requirements import pack, requirements_of
from kvhold.tiers.base import Tier
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.peer import Peer
from kvhold.tiers.registry import make_tier
from kvhold.tiers.url import parse_url

Result = TypeVar("Result")

_LAYOUT = Layout(
    groups=(Group(layers=4, planes=2, heads=4, head_dim=128, dtype="bfloat16"),),
    tokens_per_chunk=128,
)


@dataclass
class Finding:
    name: str
    ok: bool = True
    says: list[str] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)

    def wrong(self, what: str) -> None:
        self.ok = False
        self.says.append(what)


@click.command()
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="Test this tier instead of those in the settings. May be repeated.",
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Settings file, TOML or YAML."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def command(tiers: tuple[str, ...], config_file: Path | None, as_json: bool) -> None:
    """Test the node and each tier, and report faults. Exits with 1 if there is a fault."""
    check_no_secrets(tiers)
    config = load_config({"tiers": tiers} if tiers else {}, file=config_file)
    findings = [_look_at_node(config, may_differ=bool(tiers)), *asyncio.run(_look_at_tiers(config))]
    if foreign := list(advice(os.environ)):
        findings.append(Finding("environment", says=foreign))
    click.echo(
        json.dumps([asdict(finding) for finding in findings], indent=2)
        if as_json
        else "\n".join(map(_describe, findings))
    )
    if not all(finding.ok for finding in findings):
        raise SystemExit(1)


def _look_at_node(config: Config, *, may_differ: bool) -> Finding:
    """A missing node is no fault if engines start it."""
    path = socket_path(config.node.socket)
    finding = Finding(f"node on {path}")
    try:
        with NodeClient(path, config.client, name="kvhold doctor") as client:
            began = time.perf_counter()
            status = check_status(client.status())
            finding.ms["status"] = _ms(began)
            finding.says.append(f"pid {status['pid']}, {status['chunks']} chunks")
            for tier in status.get("tiers", []):
                if not tier["available"]:
                    finding.wrong(f"its tier {tier['name']} is not used: {tier['last_fault']}")
            if (control := status.get("control")) is not None:
                said = f"its API {describe_control(control)}"
                is_down = control["last_fault"] and not control["address"]
                (finding.wrong if is_down else finding.says.append)(said)
        if not may_differ:
            NodeClient(
                path, config.client, name="kvhold doctor", requires=pack(requirements_of(config))
            ).close()
    except NodeError as error:
        if path.exists() or not config.node.autostart:
            finding.wrong(str(error))
        else:
            finding.says.append("not running; the first engine starts it")
    except KVHoldError as error:
        finding.wrong(str(error))
    return finding


async def _look_at_tiers(config: Config) -> list[Finding]:
    if not config.tiers:
        finding = Finding("tiers below RAM")
        finding.says.append("none: chunks are only in memory (setting `tiers`)")
        return [finding]
    found = [await _look_at_tier(text, config) for text in config.tiers]
    return [finding for findings in found for finding in findings]


async def _look_at_tier(text: str, config: Config) -> list[Finding]:
    try:
        finding = Finding(parse_url(text).shown)
        tier, settings = make_tier(text, plugins=config.plugins)
        if warning := loss_warning(settings.codec, config.rules):
            finding.says.append(warning)
    except ConfigError as error:
        finding = Finding(text.partition("?")[0].rpartition("@")[2])
        finding.wrong(str(error))
        return [finding]
    if isinstance(tier, PeersTier):
        try:
            return await _look_at_peers(tier, finding, settings.get_timeout_s)
        finally:
            await tier.close()
    try:
        await _Visit(tier, settings, finding).run()
    except TierError as error:
        finding.wrong(str(error))
    except Exception as error:  # noqa: BLE001
        finding.wrong(f"broke the contract of a tier: {type(error).__name__}: {error}")
    finally:
        await tier.close()
    return [finding]


async def _look_at_peers(tier: PeersTier, whole: Finding, timeout_s: float) -> list[Finding]:
    """The tier is wrong if no peer can be followed."""
    listed = await tier.listed()
    found = [Finding(f"peer {peer.address}") for peer in listed]
    await asyncio.gather(
        *(
            _look_at_peer(peer, finding, timeout_s)
            for peer, finding in zip(listed, found, strict=True)
        )
    )
    whole.says.append("read_only: nothing was put")
    if fault := tier.peers_status()["list_fault"]:
        whole.wrong(fault)
    if not any(finding.ok for finding in found):
        whole.wrong("no peer can be followed")
    return [whole, *found, *await _look_at_bus(tier)]


async def _look_at_bus(tier: PeersTier) -> list[Finding]:
    bus = tier.make_bus()
    if bus is None:
        return []
    finding = Finding(f"bus {bus.source}")
    began = time.perf_counter()
    for fault in await bus.check():
        finding.wrong(fault)
    finding.ms["log in and subscribe"] = _ms(began)
    if not finding.ok:
        finding.says.append("without the bus, changes come over a connection to each peer")
    return [finding]


async def _look_at_peer(peer: Peer, finding: Finding, timeout_s: float) -> None:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            stream, welcome = await peer.open_to_follow()
        stream.close()
        version, name = quoted(welcome.kvhold, 40), quoted(welcome.name, 64)
        finding.says.append(f"{name or 'a host without a name'}, kvhold {version}")
    except TimeoutError:
        _blame(finding, peer, TimeoutError(f"no answer within {timeout_s:g} s"))
    except (OSError, EOFError, KVHoldError, ValueError) as error:
        _blame(finding, peer, error)
    finding.ms["log in"] = _ms(began)


def _blame(finding: Finding, peer: Peer, error: Exception) -> None:
    fault = peer.fault_of("connect", error)
    finding.wrong(str(fault))
    finding.says.append(f"{fault.cause}: {fault.advice}")


class _Visit:
    def __init__(self, tier: Tier, settings: GuardConfig, finding: Finding) -> None:
        self._tier = tier
        self._settings = settings
        self._finding = finding
        namespace = Namespace(model="kvhold doctor", layout=_LAYOUT)
        self._key = make_key(namespace.digest, os.urandom(HASH_BYTES), 0, 0)
        self._chunk = memoryview(bytearray(os.urandom(_LAYOUT.chunk_bytes(0, 128))))
        self._frame = frame_chunk(
            self._chunk,
            Raw(),
            key=self._key,
            layout=_LAYOUT,
            num_tokens=128,
            first_token=0,
            align=4096,
        )

    async def run(self) -> None:
        settings = self._settings
        await self._step("check", settings.get_timeout_s, self._tier.check)
        if settings.read_only or self._tier.traits.read_only:
            self._finding.says.append("read_only: nothing was put")
            return
        (fault,) = await self._step(
            "put",
            settings.put_timeout_s,
            lambda: self._tier.put([(self._key, self._frame.parts)], ttl_s=3600),
        )
        if fault is not None:
            self._finding.wrong(f"a chunk cannot be put: {fault}")
            return
        try:
            await self._read()
        finally:
            (removed,) = await self._step(
                "delete", settings.put_timeout_s, lambda: self._tier.delete([self._key])
            )
        if not removed:
            self._finding.wrong(
                "the chunk was gone before it was deleted: the tier evicts at once, or another "
                "process deletes there"
            )
        elif (
            await self._step(
                "probe", settings.probe_timeout_s, lambda: self._tier.probe([self._key])
            )
        ) != [None]:
            self._finding.wrong("a deleted chunk is still there")

    async def _read(self) -> None:
        (size,) = await self._step(
            "probe", self._settings.probe_timeout_s, lambda: self._tier.probe([self._key])
        )
        if size != self._frame.nbytes:
            found = "nothing" if size is None else f"{size} bytes"
            self._finding.wrong(
                f"{self._frame.nbytes} bytes were put and acknowledged; a probe finds {found}"
            )
            return
        whole = bytearray(self._frame.nbytes)
        (got,) = await self._step(
            "get",
            self._settings.get_timeout_s,
            lambda: self._tier.get([self._key], [[memoryview(whole)]]),
        )
        self._compare(got, whole)
        start, length = self._frame.fields.layer_range(2)
        part = bytearray(length)
        (got,) = await self._step(
            "get a layer",
            self._settings.get_timeout_s,
            lambda: self._tier.get([self._key], [[memoryview(part)]], starts=[start]),
        )
        if got != length or part != self._chunk[2 * length : 3 * length]:
            self._finding.wrong("a layer that is read alone differs from what was put")

    def _compare(self, got: int | TierError | None, whole: bytearray) -> None:
        if got != self._frame.nbytes:
            self._finding.wrong(
                f"the chunk cannot be read: {got if got is not None else 'nothing there'}"
            )
            return
        back = bytearray(len(self._chunk))
        try:
            unframe_chunk(
                memoryview(whole),
                memoryview(back),
                key=self._key,
                layout=_LAYOUT,
                num_tokens=128,
                first_token=0,
            )
        except FrameError as error:
            self._finding.wrong(f"the chunk comes back damaged: {error}")
            return
        if back != self._chunk:
            self._finding.wrong(
                "the chunk comes back with other bytes, and with checksums that match them"
            )

    async def _step(
        self, name: str, timeout_s: float, call: Callable[[], Awaitable[Result]]
    ) -> Result:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                return await call()
        except TimeoutError:
            raise TierUnavailable(
                self._tier.traits.name, name, f"no answer within {timeout_s:g} s"
            ) from None
        finally:
            self._finding.ms.setdefault(name, _ms(began))


def _describe(finding: Finding) -> str:
    times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in finding.ms.items())
    lines = [
        f"{'ok   ' if finding.ok else 'WRONG'}  {finding.name}{f'  ({times})' if times else ''}"
    ]
    lines += [f"       {said}" for said in finding.says]
    return "\n".join(lines)


def _ms(began_s: float) -> float:
    return round((time.perf_counter() - began_s) * 1e3, 3)
