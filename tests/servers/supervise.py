"""Keeps one server, and ends it when nobody needs it any more: `python supervise.py FOLDER`.

It reads commands from its standard input, a JSON list each, and answers each with a line of JSON:

    ["start", user id or null, environment, program, argument, ...]    the server's process id
    ["end", signal]    its exit status, when the process and everything that it started have ended

When its input ends, because whoever started it has closed it or has died in whatever way, it ends the server and
removes the folder. It is a session of its own, so that Ctrl+C in a terminal reaches the tests and not the servers.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def end(server: subprocess.Popen[bytes], how: int) -> int:
    """Signal the server and wait for all its processes: a restart finds nothing of it left."""
    server.send_signal(how)
    status = server.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return status


def main(folder: str) -> None:
    # Whoever started the tests in the background of a shell has these ignored, and PgBouncer leaves SIGQUIT as it is.
    for stop in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(stop, signal.SIG_DFL)
    # What a killed server leaves behind becomes a child of this process, which can then wait for it.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server: subprocess.Popen[bytes] | None = None
    try:
        for line in sys.stdin:
            match json.loads(line):
                case ["start", user, environment, *command]:
                    with open(os.path.join(folder, "log"), "ab") as log:
                        server = subprocess.Popen(
                            command,
                            user=user,
                            group=None if user is None else pwd.getpwuid(user).pw_gid,
                            extra_groups=None if user is None else [],
                            env=environment,
                            cwd=folder,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                        )
                    answer = server.pid
                case ["end", how] if server is not None:
                    answer, server = end(server, how), None
                case other:
                    raise ValueError(other)
            print(json.dumps(answer), flush=True)
    finally:
        if server is not None:
            end(server, signal.SIGQUIT)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1])
