"""Large bodies: marked before they are put, and marked before they are removed."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.commands.base import Command


class RecordObject(Command, frozen=True, tag="record_object"):
    """Mark a body that is about to be put as pending (D11)."""

    digest: str
    size: int


class ObjectMarked(msgspec.Struct, frozen=True, rename="camel"):
    """Under which name a body is to be put, and whether a commit refers to it already."""

    name: str
    referenced: bool


class SweepObjects(Command, frozen=True, tag="sweep_objects"):
    """Mark the next page of bodies that nobody refers to as about to be removed.

    Attributes:
        after: name of the last object of the page before.
        limit: objects looked at.
    """

    after: str = ""
    limit: int = 100


class ForgetObjects(Command, frozen=True, tag="forget_objects"):
    """These were marked and are removed now."""

    names: tuple[str, ...]


class ObjectsMarked(msgspec.Struct, frozen=True, rename="camel"):
    """What of a page is to be removed.

    Attributes:
        names, size: objects to remove, those that a former sweep has marked too, and bytes of them.
        pending: further objects nobody refers to, which are too young to be removed.
        looked_at: objects of the page.
        after: name of the last one; None when this was the last page.
    """

    names: tuple[str, ...]
    size: int
    pending: int
    looked_at: int
    after: str | None
