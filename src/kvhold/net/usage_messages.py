from typing import Annotated

import msgspec

from kvhold.core.store_options import MAX_TENANT
from kvhold.core.usage import HeldAges, LookupShare, PromptWorth
from kvhold.net.message_rows import Message


class MeasureHeld(Message, frozen=True):
    """-> HeldRows"""


class HeldRows(Message, frozen=True):
    rows: list[HeldAges]


class ListShares(Message, frozen=True):
    """-> ShareRows"""


class ShareRows(Message, frozen=True):
    rows: list[LookupShare]


class ListWorths(Message, frozen=True):
    """-> WorthRows"""

    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""


class WorthRows(Message, frozen=True):
    rows: list[PromptWorth]
