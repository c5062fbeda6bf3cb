from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhold.control.access import ControlRole, ForTenants
from kvhold.control.api import ClearOrder, ControlApi


@dataclass(frozen=True)
class Route:
    """path:  may end with a parameter in braces
    answer: type of the answer
    body:   type of the request's body
    query:  its parameters, with their help
    call:   gets the API, and the parameters or the body by keyword
    """

    method: str
    path: str
    role: ControlRole
    tenants: ForTenants
    summary: str
    answer: Any
    call: Callable[..., Awaitable[Any]]
    body: Any = None
    query: Mapping[str, str] = field(default_factory=dict)
    status: int = 200

    @property
    def name(self) -> str:
        return self.call.__name__

    async def run(self, api: ControlApi, *arguments: Any, **named: Any) -> Any:
        """`TenantApi` has methods of its own."""
        method = getattr(api, self.name, None)
        if method is None:
            return await self.call(api, *arguments, **named)
        return await method(*arguments, **named)

    def role_for(self, body: Any) -> ControlRole:
        """To clear everything takes more than to clear one namespace."""
        if isinstance(body, ClearOrder) and body.all:
            return ControlRole.ADMINISTER
        return self.role
