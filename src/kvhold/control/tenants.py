"""The API for one tenant: other namespaces do not exist."""

from http import HTTPStatus
from typing import TypeVar

from msgspec.structs import replace

from kvhold.control.api import (
    ClearAnswer,
    ClearOrder,
    ControlApi,
    DecisionsAnswer,
    HeldAnswer,
    JobsAnswer,
    NamespacesAnswer,
    PinsAnswer,
    PromptOrder,
    PromptsAnswer,
    ReencodeOrder,
)
from kvhold.control.jobs import JobRow, no_job
from kvhold.control.pins import PinRow, no_pin
from kvhold.control.refusals import ControlRefusal
from kvhold.control.rows import NamespaceFacts
from kvhold.control.share_history import SharesAnswer
from kvhold.core.keys import Namespace, Query
from kvhold.node import NodeClient

Row = TypeVar("Row", PinRow, JobRow)


class TenantApi(ControlApi):
    def __init__(self, whole: ControlApi, tenant: str) -> None:
        self.__dict__.update(vars(whole))
        self._tenant = tenant

    async def namespaces(self, prefix: str = "") -> NamespacesAnswer:
        described = await super().namespaces()
        used = await self._node.call(lambda client: client.status()["namespaces"])
        own = await self._own()
        rows = [row for row in described["namespaces"] if row["digest"] in own]
        others = own & used.keys() - {row["digest"] for row in rows}
        return {
            "namespaces": [row for row in rows if row["digest"].startswith(prefix.lower())],
            "others": len(others),
            "other_bytes": sum(used[digest] for digest in others),
            "tenants": {self._tenant: described["tenants"].get(self._tenant, 0)},
        }

    async def namespace(self, digest: str) -> NamespaceFacts:
        return await super().namespace(await self._whole(digest))

    async def decisions(self, request: str = "") -> DecisionsAnswer:
        return await self._decisions(request, self._tenant)

    async def held(self) -> HeldAnswer:
        held = await super().held()
        return {**held, "rows": [row for row in held["rows"] if row.tenant == self._tenant]}

    async def prompts(self) -> PromptsAnswer:
        return await self._prompts(self._tenant)

    async def shares(self, by: str = "tenant", since_s: str = "3600") -> SharesAnswer:
        if by == "client":
            raise never()
        return await self._history().read_shares(by, since_s, self._tenant)

    async def clear(self, request: ClearOrder) -> ClearAnswer:
        if request.all:
            raise never()
        if not request.tag:
            request = replace(request, namespace=await self._whole(request.namespace))
        return await super().clear(request)

    def _among(self, client: NodeClient) -> frozenset[bytes]:
        return client.owned(self._tenant)

    async def reencode(self, request: ReencodeOrder) -> JobRow:
        namespace = await self._whole(request.namespace)
        return await super().reencode(replace(request, namespace=namespace))

    async def pins(self) -> PinsAnswer:
        return {"pins": await self._only_own((await super().pins())["pins"])}

    async def unpin(self, number: int) -> PinRow:
        if all(row["number"] != number for row in (await self.pins())["pins"]):
            raise no_pin(number)
        return await super().unpin(number)

    async def jobs(self) -> JobsAnswer:
        return {"jobs": await self._only_own((await super().jobs())["jobs"])}

    async def job(self, number: int) -> JobRow:
        await self._check_job(number)
        return await super().job(number)

    async def cancel(self, number: int) -> JobRow:
        await self._check_job(number)
        return await super().cancel(number)

    async def _prompt(self, order: PromptOrder) -> tuple[Namespace, Query]:
        namespace = await self._whole(order.namespace)
        return await super()._prompt(replace(order, namespace=namespace))

    async def _digest(self, digits: str) -> bytes:
        return bytes.fromhex(await self._whole(digits))

    async def _check_job(self, number: int) -> None:
        if all(row["number"] != number for row in (await self.jobs())["jobs"]):
            raise no_job(number)

    async def _only_own(self, rows: list[Row]) -> list[Row]:
        own = await self._own()
        return [row for row in rows if row["namespace"] in own]

    async def _own(self) -> set[str]:
        digests = await self._node.call(lambda client: client.owned(self._tenant))
        return {digest.hex() for digest in digests}

    async def _whole(self, digits: str) -> str:
        """The refusal does not tell whether others have it."""
        own = await self._own()
        found = [one for one in own if digits and one.startswith(digits.lower())]
        if len(found) != 1:
            raise ControlRefusal(
                HTTPStatus.FORBIDDEN,
                "tenant",
                f"namespace {digits[:40]!r}: {len(found) or 'none'} of the token's tenant begin so",
            )
        return found[0]


def never() -> ControlRefusal:
    return ControlRefusal(
        HTTPStatus.FORBIDDEN, "tenant", "this is for tokens without a tenant: it is of all tenants"
    )
