"""The tables of the PostgreSQL store and every statement about them.

Rule 1: names, keys and the like are bytea: the UTF-8 of a text. A text of PostgreSQL holds no NUL, and is compared by
the rules of some language; bytes are compared as code points are, in every database.
Rule 2: whatever a change writes hangs on the head it was decided on: a row of `durable_head` whose revision is still
the one that was read. A change that lost the race writes nothing at all, not even a number.
Rule 3: a statement that writes passes over heads that somebody else holds, instead of waiting for them: so two of them
never wait for each other, and a host that stands still keeps nobody else waiting.
Rule 4: the columns of a row stand so that nothing lies empty between them: four rows of an ordinary step fill a page.
Rule 5: `clock_timestamp()`, never `now()`: a transaction may have waited since it began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agentscope_durable.contracts.keys import FOUND
from agentscope_durable.stores._postgres_connections import quoted

__all__ = ["CLOCK_MS", "TABLES", "Tables"]

TABLES: Final = ("meta", "head", "log", "rec", "ready", "owner", "body")
"""Each is called `durable_<name>`: a schema is often shared."""

UNSIGNED: Final = (1 << 32) - 1
"""Sums have 32 bits, and stand in a type that is signed."""
CLOCK_MS: Final = "floor(extract(epoch from clock_timestamp()) * 1000)::bigint"

_FOUND_FROM: Final = "\\x" + FOUND.encode().hex()
_FOUND_TO: Final = "\\x" + (FOUND[:-1] + "0").encode().hex()
_FOUND: Final = f"key >= '{_FOUND_FROM}'::bytea and key < '{_FOUND_TO}'::bytea"
"""Which records an index finds in every partition; "0" follows the "/" that ends their prefix."""


class Tables:
    """The statements for one schema. Their texts are few and constant, so that each is planned once.

    Args:
        schema: where the tables are.
        clock: what the store's time is, in milliseconds; for tests.
    """

    def __init__(self, schema: str, *, clock: str = CLOCK_MS) -> None:
        self.schema = schema
        self._clock = clock
        self.names = {table: f"{quoted(schema)}.{quoted('durable_' + table)}" for table in TABLES}
        self._steps: dict[bool, str] = {}
        self._groups: dict[tuple[str, ...], str] = {}
        self._readings: dict[tuple[str, ...], str] = {}
        t, clock = self.names, self._clock

        # ---------------------------------------------------------------- single readings

        self.watermarks = f"""select coalesce(h.next_seq - 1, 0) from unnest($1::bytea[]) with ordinality i(name, n)
            left join {t["head"]} h on h.name=i.name order by i.n"""
        self.sessions = f"select name from {t['head']} where name>=$1 and name<$2 order by name limit $3"
        self.holders = f"""select h.name from {t["rec"]} r join {t["head"]} h on h.p=r.p
            where r.key=$1 and r.{_FOUND.replace(" and key", " and r.key")} order by h.name limit $2"""
        self.ready = f"""with now as materialized (select greatest({clock}, $3) as ms)
            (select h.name, y.item, y.value, y.due_ms, h.rev, now.ms
            from now, {t["ready"]} y join {t["head"]} h on h.p=y.p
            where y.kind=$1 and y.klass=$2 and y.due_ms<=now.ms and y.due_ms>=$4 and (y.due_ms, y.p, y.item)>
                ($4, coalesce((select p from {t["head"]} where name=$5), -1), $6)
            order by y.due_ms, y.p, y.item limit $7)
            union all
            (select null, null, null, (select due_ms from {t["ready"]}
                where kind=$1 and klass=$2 and due_ms>now.ms order by due_ms limit 1), null, now.ms from now)"""
        self.ready_classes = f"""with recursive c(klass, n) as (
            (select klass, 1 from {t["ready"]} where kind=$1 and klass>=$2 and klass<$3 order by klass limit 1)
            union all
            select (select y.klass from {t["ready"]} y where y.kind=$1 and y.klass>c.klass and y.klass<$3
                order by y.klass limit 1), c.n + 1 from c where c.klass is not null and c.n<$4)
            select klass from c where klass is not null order by klass"""
        self.ready_of = f"""select y.kind, y.klass, y.due_ms, y.item, y.value from {t["ready"]} y
            join {t["head"]} h on h.p=y.p where h.name=$1 and y.kind=any($2::bytea[]) order by y.kind, y.item"""
        self.owners = f"""select name, renewed_ms, lease_ms, value, {clock} from {t["owner"]}
            where name>$1 order by name limit $2"""
        self.measure = f"""select octet_length(h.value),
            (select count(*) from {t["log"]} l where l.p=h.p),
            (select coalesce(sum(coalesce(octet_length(events), 0) + coalesce(octet_length(private), 0)
                + coalesce(octet_length(journal), 0)), 0) from {t["log"]} l where l.p=h.p)::bigint,
            (select count(*) from {t["rec"]} r where r.p=h.p),
            (select coalesce(sum(octet_length(key) + octet_length(value)), 0) from {t["rec"]} r where r.p=h.p)::bigint
            from {t["head"]} h where h.name=$1"""
        self.log_rows = f"""select l.first, l.rev, l.count, l.stream, l.at, l.events, l.private, l.journal,
            l.events_sum & {UNSIGNED}, l.rest_sum & {UNSIGNED} from {t["log"]} l join {t["head"]} h on h.p=l.p
            where h.name=$1 and (l.first, l.rev)>($2, $3) order by l.first, l.rev limit $4"""
        sizes = " + ".join(f"pg_total_relation_size('{name}'::regclass)" for name in t.values())
        self.stored_bytes = f"select {sizes}"

        # ---------------------------------------------------------------- leases

        self.renew = f"""insert into {t["owner"]}(name, renewed_ms, lease_ms, value) values($1, {clock}, $2, $3)
            on conflict(name) do update set renewed_ms={clock}, lease_ms=excluded.lease_ms, value=excluded.value"""
        self.release = f"delete from {t['owner']} where name=$1"
        self.forget = f"""with gone as (delete from {t["owner"]} where name=$1
                and renewed_ms + lease_ms + $3 <= {clock}
                and not exists(select from {t["ready"]} where kind=any($2::bytea[]) and klass=$1) returning 1)
            select exists(select from gone) or not exists(select from {t["owner"]} where name=$1)"""

        # ---------------------------------------------------------------- a contended Session

        self.lock = f"select p from {t['head']} where name=$1 for no key update"

    # -------------------------------------------------------------------- one moment of some Sessions

    def reading(self, parts: tuple[str, ...]) -> str:
        """One statement, so one moment: the heads of partitions and whatever else is asked of them.

        Rows are (part, n, five numbers, five byte strings); `n` counts what was asked from 1.
        """
        text = self._readings.get(parts)
        if text is None:
            text = self._readings[parts] = self._reading(parts)
        return text

    def _reading(self, parts: tuple[str, ...]) -> str:
        t, clock = self.names, self._clock
        row = "l.first, l.count::bigint, l.rev, l.at_ms, l.at, l.commit_id"
        bodies = (
            "case when g.events then l.events end, case when g.private then l.private end, "
            "case when g.journal then l.journal end, l.stream"
        )
        available: dict[str, tuple[tuple[str, ...], str]] = {
            "keys": (
                ("int[]", "bytea[]"),
                f"""select 2, g.o, {_numbers()}, r.value, {_bytes(4)} from unnest({{}}) with ordinality g(n, key, o)
                join hd on hd.n=g.n join {t["rec"]} r on r.p=hd.p and r.key=g.key""",
            ),
            "ranges": (
                ("int[]", "bytea[]", "bytea[]", "int[]"),
                f"""select 3, g.o, {_numbers()}, r.key, r.value, {_bytes(3)}
                from unnest({{}}) with ordinality g(n, low, high, most, o) join hd on hd.n=g.n
                cross join lateral (select key, value from {t["rec"]} where p=hd.p and key>=g.low and key<g.high
                    order by key limit g.most) r""",
            ),
            "owners": (
                ("bytea[]",),
                f"""select 4, g.o, r.renewed_ms, r.lease_ms, {_numbers(3)}, r.value, {_bytes(4)}
                from unnest({{}}) with ordinality g(name, o) join {t["owner"]} r on r.name=g.name""",
            ),
            "logs": (
                ("int[]", "bigint[]", "bigint[]", "int[]", "bool[]", "bool[]", "bool[]"),
                f"""select 5, g.o, {row}, {bodies}
                from unnest({{}}) with ordinality g(n, after, through, most, events, private, journal, o)
                join hd on hd.n=g.n cross join lateral (select * from {t["log"]} where p=hd.p and count>0
                    and events is not null and first + count>g.after + 1 and first<=g.through and first>=coalesce(
                        (select first from {t["log"]} where p=hd.p and first<=g.after + 1 and count>0
                        order by first desc, rev desc limit 1), 0)
                    order by first, rev limit g.most) l""",
            ),
            "streams": (
                ("int[]", "bytea[]", "bigint[]", "bigint[]", "int[]", "bool[]", "bool[]", "bool[]"),
                f"""select 6, g.o, {row}, {bodies}
                from unnest({{}}) with ordinality g(n, stream, low, high, most, events, private, journal, o)
                join hd on hd.n=g.n cross join lateral (select * from {t["log"]} where p=hd.p and stream=g.stream
                    and at>=g.low and at<=g.high order by at, rev limit g.most) l""",
            ),
            "commits": (
                ("int[]", "bigint[]", "bigint[]", "bytea[]"),
                f"""select 7, g.o, (select count(*) from {t["log"]} l where l.p=hd.p and l.first=g.first
                    and l.rev=g.rev and l.commit_id=g.commit_id),
                    (select rev from {t["log"]} l where l.p=hd.p order by first, rev limit 1),
                    {_numbers(3)}, {_bytes(5)}
                from unnest({{}}) with ordinality g(n, first, rev, commit_id, o) join hd on hd.n=g.n""",
            ),
        }
        number = 2
        selects = [
            f"select 0, 0::bigint, {clock}, {_numbers(4)}, {_bytes(5)}",
            f"select 1, n, p, rev, next_seq, pruned, at_ms, value, {_bytes(4)} from hd",
        ]
        for part in parts:
            types, select = available[part]
            selects.append(select.format(", ".join(f"${number + i}::{kind}" for i, kind in enumerate(types))))
            number += len(types)
        return (
            f"with hd as materialized (select i.n, h.* from unnest($1::bytea[]) with ordinality i(name, n) "
            f"join {t['head']} h on h.name=i.name) " + " union all ".join(selects)
        )

    # -------------------------------------------------------------------- a change

    def step(self, *, record: bool) -> str:
        """One commit of a Session whose head is known, with one record or none: the way of nearly every commit."""
        text = self._steps.get(record)
        if text is None:
            t, clock = self.names, self._clock
            put = (
                f""", r as (insert into {t["rec"]}(p, key, value) select p, $18, $19 from h
                on conflict(p, key) do update set value=excluded.value)"""
                if record
                else ""
            )
            text = self._steps[record] = f"""with k as materialized (select p from {t["head"]} where p=$1 and rev=$2
                    for no key update skip locked),
                h as (update {t["head"]} x set rev=$3, next_seq=$4, pruned=$5, at_ms=$6, value=$7 from k
                    where x.p=k.p returning x.p),
                l as (insert into {t["log"]}(p, first, rev, count, at_ms, commit_id, stream, at, events, private,
                    journal, events_sum, rest_sum)
                    select p, $8, $3, $9, $6, $10, $11, $12, $13, $14, $15, $16, $17 from h){put}
                select 1, p, {clock} from h"""
        return text

    def group(self, parts: tuple[str, ...]) -> str:
        """The commits of several Sessions, or one that does more. Gives (n, p, clock) of the Sessions that won."""
        text = self._groups.get(parts)
        if text is None:
            text = self._groups[parts] = self._group(parts)
        return text

    def _group(self, parts: tuple[str, ...]) -> str:
        t, clock = self.names, self._clock
        kept = "and not exists(select from e where e.p=x.p and e.first=x.first)" if "erased" in parts else ""
        available: dict[str, tuple[tuple[str, ...], str]] = {
            "logs": (
                (
                    *("int[]", "bigint[]", "bigint[]", "int[]", "bigint[]", "bytea[]", "bytea[]", "bigint[]"),
                    *("bytea[]", "bytea[]", "bytea[]", "int[]", "int[]"),
                ),
                f"""l as (insert into {t["log"]}(p, first, rev, count, at_ms, commit_id, stream, at, events, private,
                    journal, events_sum, rest_sum) select ok.p, g.first, g.rev, g.count, g.at_ms, g.commit_id, g.stream,
                    g.at, g.events, g.private, g.journal, g.events_sum, g.rest_sum from unnest({{}}) g(n, first, rev,
                    count, at_ms, commit_id, stream, at, events, private, journal, events_sum, rest_sum)
                    join ok on ok.n=g.n)""",
            ),
            "puts": (
                ("int[]", "bytea[]", "bytea[]"),
                f"""r as (insert into {t["rec"]}(p, key, value) select ok.p, g.key, g.value from unnest({{}})
                    g(n, key, value) join ok on ok.n=g.n on conflict(p, key) do update set value=excluded.value)""",
            ),
            "deletes": (
                ("int[]", "bytea[]"),
                f"""d as (delete from {t["rec"]} x using unnest({{}}) g(n, key) join ok on ok.n=g.n
                    where x.p=ok.p and x.key=g.key)""",
            ),
            "ready": (
                ("int[]", "bytea[]", "bytea[]", "bytea[]", "bigint[]", "bytea[]"),
                f"""rw as materialized (select * from unnest({{}}) rw(n, kind, item, klass, due_ms, value)),
                    y as (insert into {t["ready"]}(kind, p, item, klass, due_ms, value)
                    select rw.kind, ok.p, rw.item, rw.klass, rw.due_ms, rw.value from rw join ok on ok.n=rw.n
                    on conflict(kind, p, item)
                    do update set klass=excluded.klass, due_ms=excluded.due_ms, value=excluded.value)""",
            ),
            "unready": (
                ("int[]", "bytea[]", "bytea[]"),
                f"""z as (delete from {t["ready"]} x using unnest({{}}) g(n, kind, item) join ok on ok.n=g.n
                    where x.kind=g.kind and x.p=ok.p and x.item=g.item)""",
            ),
            # A row is changed once in a statement: what is erased is not pruned as well, what is written is not erased.
            "erased": (
                ("int[]", "int[]"),
                f"""e as (delete from {t["log"]} x using unnest({{}}) g(n, most) join ok on ok.n=g.n cross join lateral
                    (select rev, first from {t["log"]} where p=ok.p order by first, rev limit g.most) o
                    where x.p=ok.p and x.first=o.first and x.rev=o.rev returning x.p, x.first)""",
            ),
            "unready_kinds": (
                ("int[]", "bytea[]"),
                f"""w as (delete from {t["ready"]} x using unnest({{}}) g(n, kind) join ok on ok.n=g.n
                    where x.p=ok.p and x.kind=g.kind and not exists(select from rw
                        where rw.n=g.n and rw.kind=x.kind and rw.item=x.item))""",
            ),
            "prunes": (
                ("int[]", "bigint[]", "bytea[]", "int[]"),
                f"""u as (update {t["log"]} x set events=g.events, events_sum=g.events_sum from unnest({{}})
                    g(n, first, events, events_sum) join ok on ok.n=g.n
                    where x.p=ok.p and x.first=g.first and x.count>0 {kept})""",
            ),
        }
        kinds = ("bigint[]", "bytea[]", *["bigint[]"] * 5, "bytea[]")
        heads = ", ".join(f"${number}::{kind}" for number, kind in enumerate(kinds, 1))
        ctes = [
            f"""i as materialized (select * from unnest({heads}) with ordinality
                i(p, name, base, rev, next_seq, pruned, at_ms, value, n))""",
            f"""k as materialized (select x.p, i.n from i join {t["head"]} x on x.p=i.p and x.rev=i.base
                for no key update of x skip locked)""",
            f"""h as (update {t["head"]} x set rev=i.rev, next_seq=i.next_seq, pruned=i.pruned, at_ms=i.at_ms,
                value=i.value from k join i on i.n=k.n where x.p=k.p returning x.p, i.n)""",
        ]
        won = "select n, p from h"
        if "new" in parts:
            ctes.append(
                f"""a as (insert into {t["head"]}(name, rev, next_seq, pruned, at_ms, value)
                select name, rev, next_seq, pruned, at_ms, value from i where base=0 and (select count(*) from h)>=0
                order by name on conflict(name) do nothing returning p, name)"""
            )
            won += " union all select i.n, a.p from a join i on i.name=a.name"
        ctes.append(f"ok as materialized ({won})")
        number = 9
        for part in parts:
            if part == "new":
                continue
            types, cte = available[part]
            ctes.append(cte.format(", ".join(f"${number + i}::{kind}" for i, kind in enumerate(types))))
            number += len(types)
        return f"with {', '.join(ctes)} select n, p, {clock} from ok"

    # -------------------------------------------------------------------- the schema

    def create(self) -> Iterable[str]:
        """What makes the tables, each where it is missing."""
        t = self.names
        yield f"create table if not exists {t['meta']}(key text primary key, value text not null)"
        yield f"""create table if not exists {t["head"]}(
            p bigint generated always as identity primary key, name bytea not null, rev bigint not null,
            next_seq bigint not null, pruned bigint not null, at_ms bigint not null, value bytea not null)
            with (fillfactor=60, autovacuum_vacuum_scale_factor=0.05, toast_tuple_target=8160)"""
        yield f"create unique index if not exists durable_head_name on {t['head']}(name)"
        yield f"""create table if not exists {t["log"]}(
            p bigint not null, first bigint not null, rev bigint not null, at_ms bigint not null, at bigint not null,
            count int not null, events_sum int, rest_sum int not null, commit_id bytea not null, stream bytea,
            private bytea, events bytea, journal bytea, primary key(p, first, rev)) with (toast_tuple_target=8160)"""
        yield f"create index if not exists durable_log_stream on {t['log']}(p, stream, at) where stream is not null"
        yield f"""create table if not exists {t["rec"]}(
            p bigint not null, key bytea not null, value bytea not null, primary key(p, key))
            with (fillfactor=80, toast_tuple_target=8160)"""
        yield f"create index if not exists durable_rec_found on {t['rec']}(key) where {_FOUND}"
        yield f"""create table if not exists {t["ready"]}(
            kind bytea not null, p bigint not null, item bytea not null, klass bytea not null, due_ms bigint not null,
            value bytea not null, primary key(kind, p, item))
            with (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000)"""
        yield f"create index if not exists durable_ready_due on {t['ready']}(kind, klass, due_ms, p)"
        yield f"""create table if not exists {t["owner"]}(
            name bytea primary key, renewed_ms bigint not null, lease_ms bigint not null, value bytea not null)
            with (fillfactor=50, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000)"""
        yield f"""create table if not exists {t["body"]}(
            scope bytea not null, name bytea not null, content bytea not null, primary key(scope, name))"""
        yield f"alter table {t['body']} alter column content set storage external"

    def probe(self) -> str:
        """Fails where a table is not as this release makes it; reads no row."""
        columns = {
            "head": "p, name, rev, next_seq, pruned, at_ms, value",
            "log": "p, first, rev, count, at_ms, commit_id, stream, at, events, private, journal, events_sum, rest_sum",
            "rec": "p, key, value",
            "ready": "kind, p, item, klass, due_ms, value",
            "owner": "name, renewed_ms, lease_ms, value",
            "body": "scope, name, content",
        }
        looks = [
            f"(select 1 from (select {names} from {self.names[table]} limit 0) x)" for table, names in columns.items()
        ]
        return " union all ".join(looks)


def _numbers(count: int = 5) -> str:
    return ", ".join(["null::bigint"] * count)


def _bytes(count: int) -> str:
    return ", ".join(["null::bytea"] * count)
