"""Workspace I/O that is done once: what was offloaded is remembered until the state says it too.

Rule: an effect beside the reply (a summary, an offloaded context, a saved image) has a key that the next Run computes
again. Its answer is committed under that key, and whoever asks a second time gets it without a second effect (AS-14,
AS-15). Receipts are dropped with the next reasoning checkpoint, whose state contains what came of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Protocol

import msgspec

from agentscope_durable.adapters.agentscope.context import current_compression, in_own_commit
from agentscope_durable.adapters.agentscope.increments import Increment
from agentscope_durable.journal.position import AgentExecutionPosition

__all__ = ["receipted_offloader"]


class Receipts(Protocol):
    """Where receipts are kept."""

    @property
    def position(self) -> AgentExecutionPosition: ...

    async def commit(self, increment: Increment) -> Any: ...

    def position_rows(self) -> Increment: ...


async def once(receipts: Receipts, key: str, do: Callable[[], Awaitable[Any]]) -> Any:
    """The JSON value that `do` returned, now or when it was done before."""
    known = receipts.position.receipts.get(key)
    if known is not None:
        return msgspec.json.decode(known)
    with in_own_commit():
        done = await do()
    receipts.position.receipts[key] = msgspec.Raw(msgspec.json.encode(done))
    # What was written to the durable workspace becomes true with the receipt.
    _ = await receipts.commit(receipts.position_rows())
    return done


class _Offloading:
    """The three methods of AgentScope's Offloader, each done once."""

    receipted_offloader: Any
    receipts: Receipts

    async def offload_context(self, session_id: str, msgs: list[Any]) -> str:
        compression = current_compression()
        inner = self.receipted_offloader
        if compression is None:
            return await inner.offload_context(session_id, msgs=msgs)
        key = compression.next_key("context")
        return await once(self.receipts, key, lambda: inner.offload_context(session_id, msgs=msgs))

    async def offload_tool_result(self, session_id: str, tool_result: Any) -> str:
        inner = self.receipted_offloader
        key = f"tool/{tool_result.id}"
        return await once(self.receipts, key, lambda: inner.offload_tool_result(session_id, tool_result))

    async def offload_data_block(self, block: Any) -> Any:
        from agentscope.message import DataBlock

        # A block of a user's message has another id each time; its content says which one it is.
        digest = hashlib.sha256(block.source.model_dump_json().encode()).hexdigest()[:32]
        inner = self.receipted_offloader

        async def save() -> Any:
            return (await inner.offload_data_block(block)).model_dump(mode="json")

        return DataBlock.model_validate(await once(self.receipts, f"data/{digest}", save))


def receipted_offloader(offloader: Any, receipts: Receipts) -> Any:
    """The offloader behind receipts; a workspace stays a workspace, whose instructions the agent asks for."""
    from agentscope.workspace import WorkspaceBase

    proxy = (_workspace_class() if isinstance(offloader, WorkspaceBase) else _plain_class())()
    proxy.receipted_offloader = offloader
    proxy.receipts = receipts
    return proxy


@cache
def _plain_class() -> Any:
    class ReceiptedOffloader(_Offloading):
        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["receipted_offloader"], name)

    return ReceiptedOffloader


@cache
def _workspace_class() -> Any:
    from agentscope.workspace import WorkspaceBase

    def delegate(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.receipted_offloader, name)(*args, **kwargs)

        return method

    def own(self: Any) -> None:
        """A proxy has nothing of its own to set up."""

    namespace: dict[str, Any] = {
        name: delegate(name)
        for name in dir(WorkspaceBase)
        if not name.startswith("_") and callable(getattr(WorkspaceBase, name)) and name not in vars(_Offloading)
    }
    namespace["__init__"] = own
    namespace["__getattr__"] = lambda self, name: getattr(self.__dict__["receipted_offloader"], name)
    return type("ReceiptedWorkspace", (_Offloading, WorkspaceBase), namespace)
