"""The arguments and options that commands share, each with one name and one meaning."""

from __future__ import annotations

from typing import Annotated, Final

from agentscope_durable.cli.extra import typer

DEFAULT_STORE: Final = "./durable"
STORE_VARIABLE: Final = "DURABLE_STORE"
OBJECTS_VARIABLE: Final = "DURABLE_OBJECTS"
"""Names the object store of a store whose large bodies are in a bucket."""
LIMIT: Final = 100

Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        metavar="STORE",
        help="The store's folder, or postgresql://user@host/database.",
        show_default=True,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text for people.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", help="Items of a page, 1 to 1000.")]
Cursor = Annotated[str | None, typer.Option("--cursor", metavar="CURSOR", help="Go on after the former page.")]
RequestId = Annotated[
    str | None,
    typer.Option(
        "--request-id",
        metavar="ID",
        help="Identity of this request: a repeat with the same id does nothing twice. Drawn and printed if not given.",
    ),
]
Session = Annotated[
    str,
    typer.Argument(
        metavar="SESSION", help="namespace/id. A slash in the namespace is written %2F.", show_default=False
    ),
]
Turn = Annotated[
    str, typer.Argument(metavar="TURN", help="A Turn's id; it is found in any Session.", show_default=False)
]
Target = Annotated[
    str, typer.Argument(metavar="SESSION|TURN", help="A Session as namespace/id, or a Turn's id.", show_default=False)
]
Thread = Annotated[str, typer.Option("--thread", metavar="THREAD", help="The Thread.")]
OneThread = Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="Only this Thread.")]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN|TURN", help="A Run's id, or a Turn's for its newest Run.", show_default=False),
]
Input = Annotated[
    str | None, typer.Argument(metavar="TEXT", help="What to say; - reads standard input.", show_default=False)
]
InputFile = Annotated[str | None, typer.Option("--file", metavar="FILE", help="Read what to say from this file.")]
Document = Annotated[
    bool, typer.Option("--document", help="What was given is an input in its JSON form: version and content.")
]
