"""The keys under which records stand in a Session's partition.

Identifiers come from users and may hold any printable character, so each is escaped: no id can
reach into another's range. Ordinals are padded so that the order of keys is the order of numbers.
"""

from __future__ import annotations

from agentscope_durable.contracts.ids import SessionKey

HOST_PARTITION = ""
"""The partition of facts that belong to no Session."""

READY_TURN = "turn"
"""Ready kind: a Turn that a host may claim; class = the definition's ready class, item = thread id."""
READY_DISPATCH = "dispatch"
"""Ready kind: a tool execution that needs attention; class = route, item = turn id + "/" + call id, value =
`dispatch_value`."""
READY_LEASE = "lease"
"""Ready kind: a Thread that a host owns; class = owner, item = thread id."""
READY_RUNNING = "running"
"""Ready kind: an external execution that a host has started; class = that host, item and value as for dispatch."""


def dispatch_value(route: str, thread_id: str) -> str:
    """What a dispatcher must know before it claims: whether it serves the route, and which Thread it is about."""
    return f"{route}\x1f{thread_id}"


def dispatch_target(value: str) -> tuple[str, str]:
    """The route and the Thread of a `dispatch_value`. An id holds no control character."""
    route, _, thread_id = value.rpartition("\x1f")
    return route, thread_id


def partition(session: SessionKey) -> str:
    """The store's name of a Session. NUL cannot occur in an id, so the pair is unambiguous."""
    return f"{session.namespace}\x00{session.session_id}"


def session_of(name: str) -> SessionKey:
    namespace, _, session_id = name.partition("\x00")
    return SessionKey(namespace, session_id)


def namespace_prefix(namespace: str) -> str:
    return f"{namespace}\x00"


def escape(identifier: str) -> str:
    if "%" not in identifier and "/" not in identifier:
        return identifier
    return identifier.replace("%", "%25").replace("/", "%2F")


def unescape(part: str) -> str:
    """The identifier that `escape` wrote."""
    return part if "%" not in part else part.replace("%2F", "/").replace("%25", "%")


def spell(session: SessionKey) -> str:
    """A Session as people write it: `namespace/id`, a slash or percent sign in either escaped."""
    return f"{escape(session.namespace)}/{escape(session.session_id)}"


def _ordinal(number: int) -> str:
    return f"{number:012d}"


def thread(thread_id: str) -> str:
    return f"thread/{escape(thread_id)}"


THREADS = "thread/"


TURNS = "turn/"


def turn(turn_id: str) -> str:
    return f"{TURNS}{turn_id}"


FOUND = TURNS
"""Records with this prefix are found by their key alone, in whatever partition they are, so that an id is enough to
ask about a Turn. Stores keep an index of them."""


def order(thread_id: str, ordinal: int) -> str:
    return f"order/{escape(thread_id)}/{_ordinal(ordinal)}"


def orders(thread_id: str) -> str:
    return f"order/{escape(thread_id)}/"


def checkpoint(thread_id: str, at: int) -> str:
    return f"checkpoint/{escape(thread_id)}/{_ordinal(at)}"


def checkpoints(thread_id: str) -> str:
    return f"checkpoint/{escape(thread_id)}/"


def queue(thread_id: str, ordinal: int) -> str:
    return f"queue/{escape(thread_id)}/{_ordinal(ordinal)}"


def queues(thread_id: str) -> str:
    return f"queue/{escape(thread_id)}/"


def request(request_id: str) -> str:
    return f"request/{escape(request_id)}"


def input_(turn_id: str, ordinal: int) -> str:
    return f"input/{turn_id}/{_ordinal(ordinal)}"


def inputs(turn_id: str) -> str:
    return f"input/{turn_id}/"


def signal(turn_id: str, key: str, ordinal: int) -> str:
    return f"signal/{turn_id}/{escape(key)}/{_ordinal(ordinal)}"


def signals(turn_id: str, key: str) -> str:
    return f"signal/{turn_id}/{escape(key)}/"


def all_signals(turn_id: str) -> str:
    return f"signal/{turn_id}/"


def interaction(turn_id: str, interaction_id: str) -> str:
    return f"interaction/{turn_id}/{escape(interaction_id)}"


def interactions(turn_id: str) -> str:
    return f"interaction/{turn_id}/"


def execution(turn_id: str, call_id: str) -> str:
    return f"execution/{turn_id}/{escape(call_id)}"


def executions(turn_id: str) -> str:
    return f"execution/{turn_id}/"


def run(turn_id: str, number: int) -> str:
    return f"run/{turn_id}/{_ordinal(number)}"


def runs(turn_id: str) -> str:
    return f"run/{turn_id}/"


def message(seq: int) -> str:
    return f"message/{_ordinal(seq)}"


MESSAGES = "message/"


def message_by_id(message_id: str) -> str:
    return f"msgid/{escape(message_id)}"


def late(run_id: str, identifier: str) -> str:
    return f"late/{run_id}/{escape(identifier)}"


def lates(run_id: str) -> str:
    return f"late/{run_id}/"


def object_(name: str) -> str:
    return f"object/{name}"


def objects_of(digest: str) -> str:
    """Objects of one content."""
    return f"object/{digest}"


OBJECTS = "object/"


DROPPED = "dropped"
"""What is told of a Session that is dropped: the one record that stays of it."""


POLICIES = "policy/"


def policy(key: str) -> str:
    return f"{POLICIES}{escape(key)}"


def workspace(thread_id: str) -> str:
    return f"workspace/{escape(thread_id)}"


def entry(thread_id: str, path: tuple[str, ...]) -> str:
    """An entry of the Thread's workspace; its namespace is a prefix of its key."""
    return entries(thread_id, path[:-1]) + escape(path[-1])


def entries(thread_id: str, namespace: tuple[str, ...] = ()) -> str:
    return "".join((f"entry/{escape(thread_id)}/", *(f"{escape(name)}/" for name in namespace)))


def entry_path(key: str) -> tuple[str, ...]:
    """The path of an entry, from its key or from that of a former version."""
    kind, _, *names = key.split("/")
    return tuple(unescape(name) for name in (names[1:] if kind == "former" else names))


def content(thread_id: str, number: int) -> str:
    return f"content/{escape(thread_id)}/{_ordinal(number)}"


def uses(thread_id: str, number: int) -> str:
    """How many more than one refer to a content; no record where one alone does."""
    return f"uses/{escape(thread_id)}/{_ordinal(number)}"


def former(thread_id: str, at: int, path: tuple[str, ...]) -> str:
    """What stood at a path until the commit at a stream position."""
    return f"former/{escape(thread_id)}/{_ordinal(at)}/" + "/".join(map(escape, path))


def formers(thread_id: str) -> str:
    return f"former/{escape(thread_id)}/"


def former_at(key: str) -> int:
    """The stream position in a key that `former` made."""
    return int(key.split("/", 3)[2])


def formers_after(thread_id: str, at: int) -> str:
    """Below this key stands what commits up to `at` took the place of, above it what later ones did."""
    return f"former/{escape(thread_id)}/{_ordinal(at)}0"
