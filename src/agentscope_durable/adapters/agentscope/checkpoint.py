"""What changed in the agent's native state since the last commit.

Rule 1: a commit writes what is new. The state is compared by identity where AgentScope only appends, and by content
only where it writes in place: the open tool calls and the usage of the last messages, images that are taken out of any
message, and the fields outside the messages. So a commit costs the same after ten messages and after five thousand;
what grows is one identity comparison of a few microseconds per thousand messages.
Rule 2: identity is a shortcut, content decides. When objects were exchanged (compression, a state loaded anew, a
middleware that copies), everything in question is compared by digest: slower once, never wrong.
Rule 3: rows are computed before the commit is awaited, since concurrent tools go on changing the state meanwhile. The
writer then already counts them as stored. Whoever does not see that commit succeed drops the writer, and the live
state with it: both are rebuilt from the store. There is nothing to take back.
Rule 4: agents are reached through attributes and `model_dump_json`; AgentScope is imported by `restore` alone.

What an arbitrary middleware writes into an old block is not looked for at each commit. `full_check` at the end of a Run
compares everything and returns the rows for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import is_not
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgspec

from agentscope_durable.contracts.durable_json import sanitize_text
from agentscope_durable.contracts.errors import CorruptRecord, Misuse
from agentscope_durable.contracts.journal import (
    CACHE_FIELD,
    CONTEXT_FIELD,
    Base,
    Block,
    CacheEntry,
    CacheOrder,
    CheckpointRow,
    Drop,
    Field,
    FromOutcome,
    MessageMeta,
    MetaPatch,
    Patch,
    Trim,
)
from agentscope_durable.journal.checkpoint import CheckpointState, row_bytes

__all__ = ["CheckpointWriter", "Delta", "block_bodies", "restore", "restore_message", "sanitize_blocks"]

# AgentScope's own types, which a room that imports it inside functions only cannot name: `agentscope.state.AgentState`,
# `agentscope.message.Msg` and `agentscope.message.ContentBlock`.
_State: TypeAlias = Any
_Message: TypeAlias = Any
_Block: TypeAlias = Any

_Fields: TypeAlias = dict[str, msgspec.Raw]

TAIL_MESSAGES: Final = 2
"""Messages at the end that may change in place: the reply's own, and the one before it when a steer followed."""
REBASE_RATIO: Final = 4
"""`full_check` begins a new epoch when the rows since the base take this many times the state itself ..."""
REBASE_BYTES_MIN: Final = 256 * 1024
"""... and at least this much, so that a restore never reads much more than what it restores."""

_CACHE_OWNER, _CACHE_MEMBER = CACHE_FIELD
_NOT_SEEN: Final = object()
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Delta(NamedTuple):
    """The rows of one commit; `base` when they begin a new epoch. Both go into its `JournalBatch`."""

    rows: tuple[CheckpointRow, ...]
    base: bool


# ------------------------------------------------------------ bodies


def _body(part: _Block) -> bytes:
    return part.model_dump_json().encode()


def _meta(message: _Message) -> bytes:
    return message.model_dump_json(exclude={"content"}).encode()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _is_open(block: _Block) -> bool:
    """Whether AgentScope may still write into the block: a call that is not finished, a result that is still coming."""
    return (block.type == "tool_call" and block.state != "finished") or (
        block.type == "tool_result" and block.state == "running"
    )


def _media(block: _Block) -> tuple[object, ...] | None:
    """The parts of a block with an image, which may be taken out of it anywhere in the history; None without one."""
    if block.type == "data":
        return (block.source,) if _is_image(block) else None
    parts = block.output if block.type == "tool_result" else block.hint if block.type == "hint" else None
    if isinstance(parts, list) and any(part.type == "data" and _is_image(part) for part in parts):
        return tuple(parts)
    return None


def _is_image(block: _Block) -> bool:
    return str(block.source.media_type).startswith("image/")


def _differ(known: Sequence[object], live: Sequence[object]) -> bool:
    """Whether any object in a place that both have is another object."""
    return any(map(is_not, known, live))


def _changed(old: bytes, new: bytes) -> _Fields | None:
    """The top-level fields of `new` that `old` has otherwise; None when one of the old ones is gone."""
    before, after = _object.decode(old), _object.decode(new)
    if before.keys() - after.keys():
        return None
    return {name: json for name, json in after.items() if before.get(name) != json}


def block_bodies(blocks: Iterable[_Block]) -> tuple[msgspec.Raw, ...]:
    """Blocks as their JSON: for `content` of a `model/result` or `tool/result` payload, and for `note_outcome`.

    Written by the same function as checkpoints, so that an unchanged block is recognised by its bytes. For a tool the
    block is the `ToolResultBlock` that the agent will make of its response.
    """
    return tuple(msgspec.Raw(_body(block)) for block in blocks)


# ------------------------------------------------------------ the writer


class _Known:
    """One message as the store has it."""

    __slots__ = ("blocks", "digests", "meta", "opened")

    def __init__(self, meta: bytes) -> None:
        self.meta = meta
        self.blocks: list[_Block] = []
        self.digests: list[bytes] = []
        # The stored JSON of the blocks that AgentScope may still write into.
        self.opened: dict[int, bytes] = {}


class CheckpointWriter:
    """The rows by which one live `AgentState` differs from what the store has of it.

    A new writer knows nothing, so its first `delta` is a base with the whole state. A host that keeps a Thread's live
    state keeps its writer with it; a host that loads the state gets one with `continuing`. Not for concurrent use, and
    no method awaits.

    If a method raises (text or an object in the state that JSON cannot carry), nothing was decided: drop the writer.
    """

    def __init__(self) -> None:
        self._begun = False
        # Positions up to here may lie before the epoch's base, so no row may refer to an outcome stored there.
        self._before = 0
        self._seen = 0
        self._stored_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self._live: list[_Message] = []
        self._known: list[_Known] = []
        self._images: dict[tuple[int, int], tuple[object, ...]] = {}
        # The last dump of a field, and its members once it was compared by member.
        self._head: dict[str, tuple[bytes, dict[str, bytes] | None]] = {}
        self._summary: object = _NOT_SEEN
        self._schema: object = _NOT_SEEN
        # The cached files in order, each with the number it is stored under and its digest; None: no order is stored.
        self._cache: list[_Block] | None = None
        self._numbers: list[int] = []
        self._cache_digests: list[bytes] = []
        self._next_number = 0
        # Stored outcomes whose blocks have not entered the state: where each block is, by its type and id.
        self._outcomes: dict[tuple[bytes, bytes], tuple[int, int, _Fields]] = {}
        self._state_bytes = 0

    @classmethod
    def continuing(cls, state: _State, checkpoint: CheckpointState) -> Self:
        """A writer for a state that was just restored from `checkpoint` and not yet changed.

        Raises:
            Misuse: the state is not the one of the checkpoint.
        """
        writer = cls()
        _ = writer.base(state)
        numbers = list(checkpoint.cache or ())
        stored = [len(message.blocks) for message in checkpoint.messages], len(numbers)
        live = [len(message.content) for message in state.context], len(writer._cache or ())
        if checkpoint.base_at is None or stored != live:
            raise Misuse("a checkpoint writer was given another state than the one restored from its checkpoint")
        writer._numbers = numbers
        writer._next_number = max(numbers, default=-1) + 1
        writer._before = checkpoint.base_at - 1
        writer._seen = checkpoint.position
        writer._stored_bytes = checkpoint.stored_bytes
        return writer

    def note_outcome(self, at: int, bodies: Sequence[msgspec.Raw]) -> bool:
        """Say that a model's answer or a tool's result is stored, so that its blocks need not be stored again.

        Call it after the commit that stored it, or when it is replayed after a restart. Blocks are recognised by type
        and id when they enter the state; `base` and `full_check` forget those that did not.

        Args:
            at: the stream position of the batch with its entry.
            bodies: the `content` of all outcomes in that batch, exactly as stored (`block_bodies`).

        Returns:
            Whether rows will refer to it; not when it lies before the epoch's base.
        """
        self._seen = max(self._seen, at)
        if at <= self._before:
            return False
        for k, body in enumerate(bodies):
            fields = _object.decode(body)
            self._outcomes[_identity(fields)] = (at, k, fields)
        return True

    def delta(self, state: _State) -> Delta:
        """The rows of this commit, counted as stored from now on (Rule 3)."""
        if not self._begun:
            return self.base(state)
        rows: list[CheckpointRow] = []
        context = state.context
        if not self._align(context, rows):
            return self.base(state)
        self._image_rows(context, rows)
        for i in range(max(0, len(self._live) - TAIL_MESSAGES), len(self._live)):
            self._message_rows(i, context[i], rows)
        self._new_message_rows(context, rows)
        self._head_rows(state, rows)
        self._cache_rows(state, rows)
        self._stored_bytes += sum(map(row_bytes, rows))
        return Delta(tuple(rows), False)

    def base(self, state: _State) -> Delta:
        """The whole state as the rows of a new epoch: after a change of the writer's AgentScope, or when it pays."""
        self._forget()
        self._before = self._seen
        self._begun = True
        rows: list[CheckpointRow] = [Base()]
        self._head_rows(state, rows)
        self._cache_rows(state, rows)
        self._new_message_rows(state.context, rows)
        self._state_bytes = self._stored_bytes = sum(map(row_bytes, rows))
        return Delta(tuple(rows), True)

    def full_check(self, state: _State) -> Delta:
        """Like `delta`, and every old block, message and cached file is compared too. It costs as much as a dump.

        For the last commit of a Run: what a middleware changed in place anywhere is stored from here on. When the rows
        since the base have outgrown the state by far, the answer is a new base.
        """
        found = self.delta(state)
        self._outcomes = {}
        if found.base:
            return found
        rows = list(found.rows)
        already = len(rows)
        self._state_bytes = 0
        for i, message in enumerate(state.context):
            self._message_rows(i, message, rows, every=True)
        self._summary = self._schema = _NOT_SEEN
        self._head_rows(state, rows)
        self._cache_rows(state, rows, every=True)
        self._stored_bytes += sum(map(row_bytes, rows[already:]))
        if self._stored_bytes > max(REBASE_BYTES_MIN, REBASE_RATIO * self._state_bytes):
            return self.base(state)
        return Delta(tuple(rows), False)

    # -------------------------------------------------------- messages

    def _align(self, context: list[_Message], rows: list[CheckpointRow]) -> bool:
        """Make the known messages a prefix of the context. False when nothing of it remains: a new epoch is due."""
        if len(context) >= len(self._live) and not _differ(self._live, context):
            return True
        kept = min(len(self._live), len(context))
        for i in range(kept):
            if self._live[i] is not context[i] and not self._adopt(i, context[i], rows):
                kept = i
                break
        if kept == len(self._live):
            return True
        if kept == 0:
            return False
        rows.append(Trim(kept))
        del self._live[kept:], self._known[kept:]
        self._images = {place: parts for place, parts in self._images.items() if place[0] < kept}
        return True

    def _adopt(self, i: int, message: _Message, rows: list[CheckpointRow]) -> bool:
        """Take another object for message `i`, if it is the same message: a copy, perhaps with changes."""
        known, content = self._known[i], message.content
        if message.id != self._live[i].id or bool(known.blocks) != bool(content):
            return False
        # Compression leaves the end of a long reply under the reply's id: that is not a copy.
        if content and (known.blocks[0].type, known.blocks[0].id) != (content[0].type, content[0].id):
            return False
        self._live[i] = message
        self._message_rows(i, message, rows, every=True)
        return True

    def _new_message_rows(self, context: list[_Message], rows: list[CheckpointRow]) -> None:
        for i in range(len(self._live), len(context)):
            message = context[i]
            known = _Known(_meta(message))
            self._live.append(message)
            self._known.append(known)
            rows.append(MessageMeta(i, msgspec.Raw(known.meta), 0))
            for j, block in enumerate(message.content):
                self._new_block(i, j, block, rows)

    def _message_rows(self, i: int, message: _Message, rows: list[CheckpointRow], *, every: bool = False) -> None:
        """What changed in a known message; `every` looks into the blocks that AgentScope does not write into, too."""
        known, content = self._known[i], message.content
        if every or _differ(known.blocks, content):
            for j, block in enumerate(content[: len(known.blocks)]):
                if every or block is not known.blocks[j] or j in known.opened:
                    self._changed_block(i, j, block, rows)
        else:
            for j in [j for j in known.opened if j < len(content)]:
                self._changed_block(i, j, content[j], rows)
        meta = _meta(message)
        if len(content) < len(known.blocks):
            rows.append(MessageMeta(i, msgspec.Raw(meta), len(content)))
            del known.blocks[len(content) :], known.digests[len(content) :]
            known.opened = {j: body for j, body in known.opened.items() if j < len(content)}
            self._images = {
                place: parts for place, parts in self._images.items() if place[0] != i or place[1] < len(content)
            }
        elif meta != known.meta:
            fields, count = _changed(known.meta, meta), len(known.blocks)
            rows.append(MessageMeta(i, msgspec.Raw(meta), count) if fields is None else MetaPatch(i, fields))
        known.meta = meta
        if every:
            self._state_bytes += len(meta)
        for j in range(len(known.blocks), len(content)):
            self._new_block(i, j, content[j], rows)

    def _image_rows(self, context: list[_Message], rows: list[CheckpointRow]) -> None:
        """Blocks that had an image when they were stored: AgentScope takes the oldest images out, wherever they are."""
        for (i, j), parts in list(self._images.items()):
            content = context[i].content
            if j >= len(content):
                self._message_rows(i, context[i], rows)
                continue
            now = _media(content[j])
            same = now is not None and len(now) == len(parts) and not _differ(parts, now)
            if not same or content[j] is not self._known[i].blocks[j]:
                self._changed_block(i, j, content[j], rows)

    # -------------------------------------------------------- blocks

    def _new_block(self, i: int, j: int, block: _Block, rows: list[CheckpointRow]) -> None:
        body = _body(block)
        rows.append(self._from_outcome(i, j, body) or Block(i, j, msgspec.Raw(body)))
        known = self._known[i]
        known.blocks.append(block)
        known.digests.append(_digest(body))
        self._watch(i, j, block, body)

    def _changed_block(self, i: int, j: int, block: _Block, rows: list[CheckpointRow]) -> None:
        known = self._known[i]
        body = _body(block)
        digest = _digest(body)
        self._state_bytes += len(body)
        if digest != known.digests[j]:
            opened = known.opened.get(j)
            fields = None if opened is None else _changed(opened, body)
            rows.append(Block(i, j, msgspec.Raw(body)) if fields is None else Patch(i, j, fields))
            known.digests[j] = digest
        known.blocks[j] = block
        self._watch(i, j, block, body)

    def _watch(self, i: int, j: int, block: _Block, body: bytes) -> None:
        if _is_open(block):
            self._known[i].opened[j] = body
        else:
            _ = self._known[i].opened.pop(j, None)
        parts = _media(block)
        if parts is not None:
            self._images[i, j] = parts
        else:
            _ = self._images.pop((i, j), None)

    def _from_outcome(self, i: int, j: int, body: bytes) -> FromOutcome | None:
        """The block as a reference to the stored outcome it came in, when that is shorter."""
        if not self._outcomes:
            return None
        fields = _object.decode(body)
        at, k, stored = self._outcomes.pop(_identity(fields), (0, 0, {}))
        if not stored or stored.keys() - fields.keys():
            return None
        patch = {name: json for name, json in fields.items() if stored.get(name) != json}
        reference = FromOutcome(i, j, at, k, patch or None)
        return reference if 2 * row_bytes(reference) < len(body) else None

    # -------------------------------------------------------- the rest of the state

    def _head_rows(self, state: _State, rows: list[CheckpointRow]) -> None:
        """Fields outside the messages: small, except those known by identity (summary, schema, cached files)."""
        exclude: dict[str, Any] = {CONTEXT_FIELD: True, _CACHE_OWNER: {_CACHE_MEMBER}}
        if state.summary is self._summary:
            exclude["summary"] = True
        reply = state.reply_context
        if reply.structured_schema is self._schema:
            # A class would be turned into its JSON schema again at each commit.
            exclude["reply_context"] = {"structured_schema"}
        self._summary, self._schema = state.summary, reply.structured_schema
        fields = _object.decode(state.model_dump_json(exclude=exclude))
        for name, json in fields.items():
            body = bytes(json)
            known = self._head.get(name)
            if known is not None and known[0] == body:
                continue
            if known is None or not (body.startswith(b"{") and known[0].startswith(b"{")):
                rows.append(Field(name, None, json))
                self._head[name] = (body, None)
                continue
            before = _members(known[0]) if known[1] is None else known[1]
            after = _members(body)
            skipped: Iterable[str] = exclude.get(name, ())
            rows.extend(
                Field(name, key, msgspec.Raw(member)) for key, member in after.items() if before.get(key) != member
            )
            rows.extend(Drop(name, key) for key in before if key not in after and key not in skipped)
            after |= {key: before[key] for key in skipped if key in before}
            self._head[name] = (body, after)

    def _cache_rows(self, state: _State, rows: list[CheckpointRow], *, every: bool = False) -> None:
        """The read-file cache, whose entries AgentScope replaces and moves but never writes into."""
        entries: list[_Block] | None = getattr(getattr(state, _CACHE_OWNER), _CACHE_MEMBER, None)
        if entries is None:
            return
        cached = [] if self._cache is None else self._cache
        if self._cache is not None and not every and len(entries) == len(cached) and not _differ(cached, entries):
            return
        known = list(zip(self._numbers, self._cache_digests, strict=True))
        by_identity = {} if every else {id(entry): pair for entry, pair in zip(cached, known, strict=True)}
        by_digest = {digest: number for number, digest in known}
        placed: dict[int, bytes] = {}
        for entry in entries:
            number, digest = by_identity.get(id(entry), (-1, b""))
            if number < 0 or number in placed:
                body = _body(entry)
                digest = _digest(body)
                number = by_digest.get(digest, -1)
                if number < 0 or number in placed:
                    number, self._next_number = self._next_number, self._next_number + 1
                    rows.append(CacheEntry(number, msgspec.Raw(body)))
            placed[number] = digest
        numbers = list(placed)
        if self._cache is None or numbers != self._numbers:
            rows.append(CacheOrder(tuple(numbers)))
        self._cache, self._numbers, self._cache_digests = list(entries), numbers, list(placed.values())


def _members(body: bytes) -> dict[str, bytes]:
    """An object's members as bytes of their own: kept for long, and the dump they were part of is not."""
    return {key: bytes(member) for key, member in _object.decode(body).items()}


def _identity(fields: Mapping[str, msgspec.Raw]) -> tuple[bytes, bytes]:
    """A block's type and id as they are written."""
    return bytes(fields.get("type", b"")), bytes(fields.get("id", b""))


# ------------------------------------------------------------ states and text


def restore(state_json: bytes) -> Any:
    """The live `agentscope.state.AgentState` of a folded state; imports AgentScope's state module and no more.

    What a round trip cannot keep: the class of a structured output's schema comes back as the schema itself, and tuples
    and sets that a middleware stored come back as lists.

    Raises:
        CorruptRecord: the installed AgentScope cannot read it; names the first place and what is wrong with it.
    """
    from agentscope.state import AgentState

    return _validated(AgentState, state_json, "native state")


def restore_message(message_json: bytes, i: int) -> Any:
    """One message of a folded state, as `restore` would restore it.

    Raises:
        CorruptRecord: as `restore`.
    """
    from agentscope.message import Msg

    return _validated(Msg, message_json, f"native state, message {i}")


def _validated(model: Any, json: bytes, what: str) -> Any:
    from pydantic import ValidationError

    try:
        return model.model_validate_json(json)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole of it"
        raise CorruptRecord(what, model.__name__, f"{place}: {first['type']}") from error


def sanitize_blocks(blocks: Iterable[_Block]) -> list[Any]:
    """Blocks from a model or a tool as they may enter the state: lone surrogates in any text become U+FFFD (D5).

    Such text cannot be stored, and the answer it came in has already happened. Call it before anything keeps the
    blocks. A clean block is returned itself, another one as a corrected copy. Other things that JSON cannot carry are
    left alone.
    """
    return [_clean_block(block) for block in blocks]


def _clean_block(block: _Block) -> Any:
    try:
        _ = block.model_dump_json()
    except ValueError:
        return _clean(block)
    return block


def _clean(part: Any) -> Any:
    """The same object when it needs no correction."""
    if type(part) is str:
        return sanitize_text(part)
    if isinstance(part, list | tuple):
        items: list[Any] = [_clean(item) for item in part]
        return items if _differ(part, items) else part
    if isinstance(part, dict):
        members = {_clean(key): _clean(member) for key, member in part.items()}
        return members if _differ([*part, *part.values()], [*members, *members.values()]) else part
    if hasattr(part, "model_copy"):
        fields: dict[str, Any] = {**vars(part), **(part.model_extra or {})}
        update = {name: cleaned for name, field in fields.items() if (cleaned := _clean(field)) is not field}
        return part.model_copy(update=update) if update else part
    return part
