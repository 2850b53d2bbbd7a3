"""What stands in a state store of AgentScope 2.0: where a main Thread began, and a copy of where it is (AS-20, D21).

Rule 1: taken once. A main Thread without a state begins with what stands there, as a `migration/baseline` of its
journal; if it cannot be had, the Turn does not begin with something else instead.
Rule 2: the copy follows the commit. It is written once for each Turn that ends, after that commit stands; where that
failed or the process died first, the next Turn writes it before it changes anything (AS-31).
Rule 3: whoever waits for the copy waits for a bounded time, and no failure of it reaches the Turn.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from weakref import WeakValueDictionary

from agentscope_durable.adapters.agentscope.native import load_native, restored
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.errors import Incompatible, NotFound, Unavailable
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey, ThreadKey
from agentscope_durable.contracts.questions import ListCheckpoints, LoadCheckpoint, LoadThread
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.views import CheckpointPage
from agentscope_durable.journal.state_store import AGENT_STATE, AgentStateStore
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.checkpoint import StoredCheckpoint
from agentscope_durable.spi.harness import AfterSettlement

__all__ = ["AppStateStore", "Mirror", "settled_state"]

STATE_STORE_SECONDS_MAX: Final = 30.0
"""How long a state store may take to answer."""

log = logging.getLogger("agentscope_durable.adapters")


class Mirror:
    """One state store, as the Runs of an adapter use it."""

    def __init__(self, store: AgentStateStore) -> None:
        self._store = store
        # Copies of one Session are written in the order of their commits, however slow one of them is.
        self._orders: WeakValueDictionary[SessionKey, asyncio.Lock] = WeakValueDictionary()

    async def first_state(self, session: SessionKey, *, installed: str) -> Any:
        """The live state that a new main Thread begins with; None: nothing stands there.

        Raises:
            Unavailable: the store does not answer.
            Incompatible: the installed AgentScope cannot read what it holds.
        """
        try:
            async with asyncio.timeout(STATE_STORE_SECONDS_MAX):
                stored = await self._store.get(session.namespace, session.session_id, AGENT_STATE)
        except TimeoutError as error:
            raise Unavailable(f"the state store did not answer within {STATE_STORE_SECONDS_MAX:.0f} s") from error
        if stored is None:
            return None
        try:
            return restored(stored.encode(), installed=installed)
        except Incompatible as error:
            place = f"the {AGENT_STATE} of session {session.session_id!r} in the state store"
            raise Incompatible(place, required=error.required, present=error.present) from error

    async def copy(self, session: SessionKey, value: str) -> bool:
        """Let this settled state stand in the slot. Returns whether it does; what failed is logged."""
        order = self._orders.get(session)
        if order is None:
            order = self._orders[session] = asyncio.Lock()
        try:
            async with order, asyncio.timeout(STATE_STORE_SECONDS_MAX):
                if await self._store.get(session.namespace, session.session_id, AGENT_STATE) != value:
                    await self._store.put(session.namespace, session.session_id, AGENT_STATE, value)
        except Exception as error:  # noqa: BLE001 - a copy that fails is made up for by the next one (AS-31)
            # Without its text: it is a stranger's, and may hold a secret (D25).
            log.warning(
                "the agent_state copy was not written: %s",
                type(error).__name__,
                extra={"session_id": session.session_id},
            )
            return False
        return True

    def later(self, session: SessionKey, value: str) -> AfterSettlement:
        """`copy`, for once the state is committed. It does not show what it holds."""

        async def copy() -> bool:
            return await self.copy(session, value)

        return copy


async def settled_state(backend: SessionBackend, session: SessionKey, *, installed: str) -> str | None:
    """The state of the main Thread's last settled position as AgentScope writes it; None: there is none yet."""
    thread = ThreadKey(session, MAIN_THREAD_ID)
    page: CheckpointPage = await backend.query(
        ListCheckpoints(session=session, thread_id=MAIN_THREAD_ID, limit=1), audience=Audience.HOST
    )
    if page.current is None:
        return None
    at = stream_position(thread, page.current)
    stored: StoredCheckpoint = await backend.query(
        LoadCheckpoint(session=session, thread_id=MAIN_THREAD_ID, at=at), audience=Audience.HOST
    )
    rows = await backend.query(
        LoadThread(session=session, thread_id=MAIN_THREAD_ID, first=stored.base_at, last=at, digest=stored.digest),
        audience=Audience.HOST,
    )
    return load_native(rows, installed=installed).state.model_dump_json()


class AppStateStore:
    """AgentScope's own application storage as a state store: `AsyncSQLAlchemyStorage`, `RedisStorage`, or any other
    `agentscope.app.storage.StorageBase`.

    The session is the application's own, under the same user and session id: it has to be there. One that was never
    used counts as no state.

    Args:
        storage: entered and closed by whoever made it.
        agent_id: whose sessions these are.
    """

    def __init__(self, storage: Any, agent_id: str) -> None:
        self._storage = storage
        self._agent_id = agent_id

    async def get(self, user_id: str, session_id: str, key: str = AGENT_STATE) -> str | None:
        record = None if key != AGENT_STATE else await self._storage.get_session(user_id, self._agent_id, session_id)
        if record is None or not (record.state.context or record.state.summary):
            return None
        return record.state.model_dump_json()

    async def put(self, user_id: str, session_id: str, key: str, value: str) -> None:
        """
        Raises:
            NotFound: the application has no such session.
        """
        from agentscope.state import AgentState

        state = AgentState.model_validate_json(value)
        try:
            await self._storage.update_session_state(user_id, self._agent_id, session_id, state)
        except KeyError as error:
            raise NotFound("session of the application", session_id) from error
