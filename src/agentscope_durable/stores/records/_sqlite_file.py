"""The SQLite file: what it is, how it is created and opened, and SQLite's faults in our own words.

Rule 1: a file that is not ours, or of another format, keeps every byte, and gets no `-wal` beside it:
it is looked at through an immutable read-only connection before anything else opens it.
Rule 2: a new file is made under another name and linked into place when it is complete, so that a
store exists entirely or not at all, whoever is killed when. Once it exists, every draft of it is useless, also one that
is being made: whoever opens it removes them.
Rule 3: never open the file but through SQLite. Closing any other descriptor of it drops this
process's POSIX locks, and two writers would meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal

import apsw

from agentscope_durable.contracts.errors import (
    CorruptRecord,
    DurableError,
    Incompatible,
    InvalidRequest,
    Misuse,
    NotADatabase,
    StoreBusy,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    Unavailable,
    UnknownFormat,
)
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.spi.environment import Environment
from agentscope_durable.stores._disk import sync_directory
from agentscope_durable.stores.records._sqlite_rows import FOUND_BY_KEY

Synchronous = Literal["NORMAL", "FULL", "EXTRA"]

APPLICATION_ID = 0x41674475
"""`AgDu`, in the header of the file."""
PATH_BYTES_MAX = 480
"""Bytes of a store's path: SQLite takes 511, and puts its own endings and ours behind it."""
DRAFTS_MAX = 256
"""Files of makings that came to nothing that one opening removes; the next one goes on."""
_BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite puts beside a file while it writes it."""
_DRAFT = rf"\.[0-9a-f]{{16}}\.new({'|'.join(_BESIDE)})?"
PAGE_BYTES = 8192
CACHE_KIB = 64_000
STATEMENTS = 400
"""Prepared statements a connection keeps at most: a writer has one for each table and length of a group."""

SCHEMA = f"""
create table meta(key text primary key, value text not null) strict, without rowid;

-- One hot row per Session. `p` stands for its name in the other tables; 0 is the partition of no Session.
create table head(
    p integer primary key, name text not null unique, rev integer not null, next_seq integer not null,
    pruned integer not null, value blob not null) strict;

-- One row per commit, appended. `first` of a row without events is the number the next event will get.
-- The sums tell of each row whether it is what was written; a digest over many rows cannot tell which one is not.
create table log(
    id integer primary key, p integer not null, first integer not null, rev integer not null, count integer not null,
    at_ms integer not null, commit_id blob not null, stream text, at integer not null,
    events blob, private blob, journal blob, events_sum integer, rest_sum integer not null) strict;
create unique index log_first on log(p, first, rev);
create index log_stream on log(p, stream, at) where stream is not null;

create table rec(p integer not null, key text not null, value blob not null, primary key(p, key)) strict;
create index rec_found on rec(key) where {FOUND_BY_KEY};

create table ready(
    kind text not null, p integer not null, item text not null, klass text not null, due_ms integer not null,
    value text not null, primary key(kind, p, item)) strict, without rowid;
create index ready_due on ready(kind, klass, due_ms, p, item);
"""

# The corruption of "WAL-reset": fixed in 3.51.3; 3.52.0 was withdrawn.
_WAL_RESET = (3007000, 3051002)
_WITHDRAWN = 3052000

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "gpfs", "beegfs", "glusterfs", "ocfs2"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"}
    | {"fuse.goofys", "fuse.blobfuse", "fuse.blobfuse2", "fuse.mount-s3", "vboxsf", "prl_fs", "fuse.vmhgfs-fuse"}
)


def version_risk(number: int, text: str) -> str | None:
    """What this SQLite can do to a store; None if nothing is known against it."""
    if not (_WAL_RESET[0] <= number <= _WAL_RESET[1] or number == _WITHDRAWN):
        return None
    return f"SQLite {text} can corrupt a store that several connections write (its WAL-reset defect, fixed in 3.51.3)"


def check_version(number: int, text: str, *, strict: bool) -> None:
    """Warn about, or with `strict` refuse, a SQLite that can corrupt a file with several connections."""
    risk = version_risk(number, text)
    if risk is None:
        return
    if strict:
        raise Incompatible("the SQLite store", required="SQLite 3.51.3 or later, not 3.52.0", present=f"SQLite {text}")
    warnings.warn(f"{risk}; install a newer apsw", RuntimeWarning, stacklevel=2)


def check_filesystem(path: Path, mounts: str) -> None:
    """Refuse a network filesystem: its locks and its memory maps do not keep SQLite's promises."""
    kind = _filesystem_of(path, mounts)
    if kind in _NETWORK:
        raise InvalidRequest(
            f"{str(path)!r} is on a network filesystem ({kind}), where SQLite cannot lock safely; choose a local disk, "
            + "a PostgreSQL store, or pass allow_network_filesystem=True if only one machine ever opens it",
            path="path",
        )


def _filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem a path is on, "" if unknown."""
    there = os.path.realpath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = there == point or there.startswith(point.rstrip("/") + "/")
        # Of two mounts at one point the later one is on top.
        if inside and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


def read_mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


class SqliteFile:
    """One store's file and how it is opened."""

    def __init__(self, path: Path, *, busy_timeout: float, synchronous: Synchronous) -> None:
        self.path = path
        self.location = str(path)
        self.busy_timeout = busy_timeout
        self.synchronous: Synchronous = synchronous

    def prepare(self, environment: Environment) -> None:
        """Create the file if there is none; refuse it if it is not a store of this format."""
        if not os.path.lexists(self.path):
            self._create(environment)
        self.inspect(lambda: self.look("?mode=ro"))
        for draft in self.drafts():
            # Where it may not be removed, it stays: nobody reads it.
            with contextlib.suppress(OSError):
                draft.unlink()

    def drafts(self) -> list[Path]:
        """Files of makings that this store was not, at most DRAFTS_MAX: their maker was killed, or is too late."""
        name = re.compile(re.escape(self.path.name) + _DRAFT)
        try:
            with os.scandir(self.path.parent) as found:
                drafts = islice((one.name for one in found if name.fullmatch(one.name)), DRAFTS_MAX)
                return sorted(self.path.with_name(draft) for draft in drafts)
        except OSError:
            return []  # A folder may let its files be opened by whoever knows their names, and be listed by nobody.

    def connect(self, *, readonly: bool = False, checkpoints: bool = False) -> apsw.Connection:
        """A connection with this store's settings.

        Args:
            readonly: it cannot write, whatever is asked of it.
            checkpoints: it moves the write-ahead log into the file; one connection of a store does.
        """
        flags = apsw.SQLITE_OPEN_READONLY if readonly else apsw.SQLITE_OPEN_READWRITE
        connection = apsw.Connection(self.location, flags=flags, statementcachesize=STATEMENTS)
        self.wait_for_locks(connection)
        if not readonly and connection.readonly("main"):
            connection.close()
            raise StoreReadOnly(self.location)
        run = connection.execute
        run("pragma trusted_schema=off").fetchall()
        run(f"pragma synchronous={self.synchronous}").fetchall()
        run(f"pragma cache_size=-{CACHE_KIB}").fetchall()
        if not checkpoints:
            run("pragma wal_autocheckpoint=0").fetchall()
        return connection

    def wait_for_locks(self, connection: apsw.Connection) -> None:
        connection.set_busy_handler(_patience(self.busy_timeout))

    def stored_bytes(self) -> int:
        """The file and the log beside it, which grows until it is moved into the file."""
        found = 0
        for name in (self.location, f"{self.location}-wal"):
            with contextlib.suppress(FileNotFoundError):
                found += os.stat(name).st_size
        return found

    def check_place(self, connection: apsw.Connection) -> None:
        """What is written to a file that was deleted or moved away is lost when this process ends, or is mixed with the
        log of another store: better not written. What is read from it nobody adds to any more. Costs one look at a
        directory.

        Raises:
            StoreMoved: the file that this connection has open is not at its place.
        """
        moved = ctypes.c_int(0)
        if connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved)) and moved.value:
            raise StoreMoved(self.location)

    def translate(self, error: Exception) -> Exception:
        """SQLite's fault as an error of this library. Nothing was written when it is raised."""
        if isinstance(error, UnicodeDecodeError):
            # SQLite hands out what stands in its pages; text of a broken page need not be any.
            return CorruptRecord(self.location, "text", f"byte {error.start} is not UTF-8")
        if isinstance(error, DurableError) or not isinstance(error, apsw.Error):
            return error
        if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError):
            ours: DurableError = StoreBusy(self.location)
        elif isinstance(error, apsw.FullError):
            ours = StoreFull(self.location)
        elif isinstance(error, apsw.ReadOnlyError):
            ours = StoreReadOnly(self.location)
        elif isinstance(error, apsw.CantOpenError) and len(os.fsencode(self.path.absolute())) > PATH_BYTES_MAX:
            ours = InvalidRequest(
                f"SQLite cannot open {self.location!r}: choose a path of at most {PATH_BYTES_MAX} bytes",
                path="path",
            )
        elif isinstance(error, apsw.NotADBError):
            ours = NotADatabase(self.location)
        elif isinstance(error, apsw.CorruptError):
            ours = CorruptRecord(self.location, "SQLite database", str(error))
        elif isinstance(error, apsw.ConstraintError | apsw.MismatchError | apsw.RangeError | apsw.SQLError):
            ours = Misuse(f"a change cannot be stored: {error}")
        else:
            ours = Unavailable(f"the store {self.location!r} failed: {error}")
        ours.__cause__ = error
        return ours

    def _create(self, environment: Environment) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{environment.random_bytes(8).hex()}.new")
        try:
            connection = apsw.Connection(str(draft))
            run = connection.execute
            run(f"pragma page_size={PAGE_BYTES}")
            run("begin exclusive")
            run(f"pragma application_id={APPLICATION_ID}")
            run(f"pragma user_version={STORAGE_FORMAT}")
            run(SCHEMA)
            run("insert into meta values('revision', ?)", (STORAGE_REVISION,))
            run("commit")
            run("pragma journal_mode=wal").fetchall()
            connection.close()
            with contextlib.suppress(FileExistsError):  # Another process was faster: its file it is.
                _link(draft, self.path)
            sync_directory(self.path.parent)
        except apsw.Error as error:
            # Whoever was faster has swept this draft away, in the midst of it.
            if not os.path.lexists(self.path):
                raise self.translate(error) from error
        except PermissionError as error:
            raise StoreReadOnly(self.location) from error
        finally:
            for ending in ("", *_BESIDE):
                draft.with_name(draft.name + ending).unlink(missing_ok=True)

    def inspect(self, reread: Callable[[], apsw.Connection]) -> None:
        """Refuse a file that is not a store of this format, and leave every byte of it as it is.

        Args:
            reread: a connection that reads consistently while hosts write.
        """
        if self.path.is_dir():
            raise NotADatabase(self.location)
        try:
            connection = self.look("?mode=ro&immutable=1")
            try:
                application_id = int(connection.pragma("application_id") or 0)
                version = int(connection.pragma("user_version") or 0)
            finally:
                connection.close()
            if application_id != APPLICATION_ID:
                raise NotADatabase(self.location)
            supported = f"{STORAGE_FORMAT} ({STORAGE_REVISION})"
            if version != STORAGE_FORMAT:
                raise UnknownFormat(self.location, found=str(version or "missing"), supported=supported)
            revision = self._revision(reread)
        except apsw.Error as error:
            raise self.translate(error) from error
        if revision != STORAGE_REVISION:
            raise UnknownFormat(self.location, found=f"{version} ({revision})", supported=supported)

    def _revision(self, reread: Callable[[], apsw.Connection]) -> str:
        # A checkpoint may be moving pages while an immutable connection looks: then look again, as a normal reader.
        for connect, again in ((lambda: self.look("?mode=ro&immutable=1"), True), (reread, False)):
            connection = connect()
            try:
                rows = connection.execute("select value from meta where key='revision'").fetchall()
                return str(rows[0][0]) if rows else "missing"
            except apsw.CorruptError:
                if not again:
                    raise
            except apsw.SQLError:  # No such table.
                return "missing"
            finally:
                connection.close()
        raise AssertionError("unreachable")

    def look(self, options: str) -> apsw.Connection:
        """A connection that only reads, by options of SQLite's URIs."""
        uri = self.path.absolute().as_uri() + options
        return apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:
        # A filesystem without hard links. A rename could replace another process's new file, so it comes second.
        if not os.path.lexists(path):
            os.rename(draft, path)


def _patience(budget: float) -> Callable[[int], bool]:
    """Wait for a lock by asking every millisecond.

    SQLite's own handler backs off to 100 ms, and one that asks so seldom hardly ever meets the gap
    between two commits of a busy neighbour: it waited for seconds where this one waits for 30 ms.
    """
    started = 0.0

    def again(asked: int) -> bool:
        nonlocal started
        now = time.monotonic()
        if asked == 0:
            started = now
        if now - started >= budget:
            return False
        time.sleep(0.001 if asked < 1000 else 0.005)
        return True

    return again
