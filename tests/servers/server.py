"""Real servers for tests, on 127.0.0.1 and Unix sockets. They end with whoever started them, however that one ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.servers import place

USER = "durable"
READY_SECONDS_MAX = 60.0
"""How long a start may take: a restart after a crash reads the log of the transactions again."""
LOOK_SECONDS = 0.01
"""Between two looks whether a server is ready."""
SUPERVISE = Path(__file__).with_name("supervise.py")


class Server:
    """One server process in a folder of its own. A context manager."""

    kind = ""

    def __init__(self, base: Path | None = None) -> None:
        self.port = place.free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.kind}-", dir=base or place.base()))
        self._user = place.server_user()
        if self._user is not None:
            os.chown(self.folder, self._user, -1)
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SUPERVISE), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = 0
        """The server's main process; 0 while it does not run."""

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and remove its folder."""
        self._supervisor.communicate()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return place.environment(Path(self._command()[0]))

    def start(self) -> None:
        """Start the server where it has been, and wait until it takes connections."""
        self.pid = self._ask("start", self._user, self._environment(), *self._command())
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self._is_ready():
            # The supervisor has not waited for it, so a server that ended is a zombie: it has no command line.
            if not Path(f"/proc/{self.pid}/cmdline").read_bytes() or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} does not start:\n{self.log}")
            time.sleep(LOOK_SECONDS)

    def end(self, how: signal.Signals) -> None:
        """Signal the server and wait until nothing of it is left. Its data stay."""
        self._ask("end", how)
        self.pid = 0

    def _ask(self, *command: Any) -> int:
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None
        print(json.dumps(command), file=self._supervisor.stdin, flush=True)
        return json.loads(self._supervisor.stdout.readline())


class PostgresServer(Server):
    """PostgreSQL with every promise of durability on.

    Args:
        programs: `place.postgres_15()` or `place.postgres_18()`.
        base: where its folder is made; the server's user must be able to go there.
        environment: what else its processes find in their environment.
        settings: of the server.
    """

    kind = "pg"

    def __init__(
        self,
        programs: Path,
        *,
        base: Path | None = None,
        environment: dict[str, str] | None = None,
        **settings: str,
    ) -> None:
        self.programs = programs
        self._settings = {"max_connections": "200", "jit": "off", **settings}
        self._extra = environment or {}
        super().__init__(base)
        self.data = self.folder / "data"
        self._fill()
        self.start()

    def _fill(self) -> None:
        """Make the cluster's folder."""
        shutil.copytree(_initialised(self.programs), self.data, symlinks=True)
        if self._user is not None:
            for name, _, files in os.walk(self.data):
                os.chown(name, self._user, -1)
                for file in files:
                    os.chown(os.path.join(name, file), self._user, -1)

    def _command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            **self._settings,
        }
        arguments = [argument for name, value in settings.items() for argument in ("-c", f"{name}={value}")]
        return [str(self.programs / "postgres"), "-D", str(self.data), *arguments]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self._extra

    def _is_ready(self) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # The file of a killed server is still there: the first line tells whose it is, the eighth how far it is.
        return lines[:1] == [str(self.pid)] and len(lines) >= 8 and lines[7].strip() == "ready"

    def dsn(self, database: str = "postgres", *, port: int | None = None) -> str:
        return f"postgresql://{USER}@127.0.0.1:{port or self.port}/{database}"

    def unix_dsn(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def stop_immediately(self) -> None:
        """What `pg_ctl stop -m immediate` does: no checkpoint, connections cut; the next start recovers."""
        self.end(signal.SIGQUIT)

    def kill(self) -> None:
        """`kill -9` of the main process; the others notice and end."""
        self.end(signal.SIGKILL)

    def stop(self) -> None:
        """What `pg_ctl stop -m fast` does: connections cut, a checkpoint, an orderly end."""
        self.end(signal.SIGINT)


class StandbyServer(PostgresServer):
    """A hot standby: a copy of a server that follows it by streaming, and can be read."""

    def __init__(self, primary: PostgresServer) -> None:
        self._primary = primary
        super().__init__(primary.programs)

    def _fill(self) -> None:
        copies = [self.programs / "pg_basebackup", "-d", self._primary.dsn(), "-D", self.data, "-R", "-c", "fast"]
        subprocess.run(
            copies, env=self._environment(), user=self._user, cwd=self.folder, check=True, stdout=subprocess.DEVNULL
        )


class PgBouncerServer(Server):
    """PgBouncer in transaction mode before a PostgreSQL server, whose databases all have their names here too.

    Debian 12 has 1.18: a connection's named prepared statements are not there in the next transaction.
    """

    kind = "pool"

    def __init__(self, postgres: PostgresServer, **settings: str) -> None:
        self._program = place.pgbouncer()
        super().__init__()
        lines = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": str(self.folder),
            "auth_type": "any",
            "pool_mode": "transaction",
            "max_client_conn": "200",
            "default_pool_size": "8",
            **settings,
        }
        (self.folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={postgres.port} user={USER}\n"
            + "[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in lines.items())
        )
        self.start()

    def _command(self) -> list[str]:
        return [str(self._program), str(self.folder / "pgbouncer.ini")]

    def _is_ready(self) -> bool:
        return (self.folder / f".s.PGSQL.{self.port}").exists()

    def dsn(self, database: str = "postgres") -> str:
        """With asyncpg this needs `statement_cache_size=0`."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"


def _initialised(programs: Path) -> Path:
    """A cluster's folder as initdb leaves it, made once for a version and copied for each server."""
    user = place.server_user()
    environment = place.environment(programs / "initdb")
    told = subprocess.run(
        [programs / "postgres", "--version"], env=environment, capture_output=True, text=True, check=True
    )
    name = f"template-{told.stdout.split()[2]}"
    with place.alone(name) as base:
        template = base / name
        if not template.exists():
            partial = base / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            if user is not None:
                os.chown(partial, user, -1)
            subprocess.run(
                [programs / "initdb", "-D", partial, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
                env=environment, user=user, cwd=base, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            partial.rename(template)
    return template
