"""`mingc audit`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import cloup

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, common, option
from mingc.console.progress import step_logger
from mingc.errors import ConfigError

if TYPE_CHECKING:
    from mingc.audit.measures import Embed


@cloup.command(cls=Command)
@click.argument("a")
@click.argument("b", required=False)
@option(
    "--self",
    "is_self",
    is_flag=True,
    help="Ask A everything that has a known answer; beside B if it is given.",
)
@option(
    "--transcriber",
    metavar="URL|COMMAND",
    show_default="the server that spoke; files are not transcribed",
    help="What transcribes sounds: a server, or a command that prints the text of the file named last or as {}.",
)
@option("--repeats", type=click.IntRange(min=1), default=2, help="How often a server speaks each sentence.")
@option("--artifact", type=PATH, help="Take the speaker network of this artifact for drift of the voice.")
@option(
    "--media", type=PATH, help="Folder with the files of published prompts (docs/first-run.md names them)."
)
@option("--html", type=PATH, help="Also write the report as one HTML file with spectrograms and sounds.")
@common
def command(
    as_json: bool,
    a: str,
    b: str | None,
    is_self: bool,
    transcriber: str | None,
    repeats: int,
    artifact: Path | None,
    media: Path | None,
    html: Path | None,
) -> int:
    """Compare how A and B sound, or check what a server says and hears.

    A and B are sound files, folders of them, URLs of servers, or artifacts, which are served for it. Exits with 3 when
    the verdict is `different` or `bad`.
    """
    if b is None and not is_self:
        raise ConfigError("there is no B", where="mingc audit", fix="name a second group, or pass --self")

    try:
        from mingc.audit.audit import audit
        from mingc.audit.page import write_page
        from mingc.audit.server import transcriber as transcriber_of
    except ImportError as error:
        raise ConfigError(
            f"mingc audit needs {error.name}", where="mingc audit", fix="pip install 'mingc[serve]'"
        ) from error
    from mingc.console.report import show
    from mingc.console.report_page import check_output_path

    if html is not None:
        check_output_path(html, "--html")
    words = click.get_current_context().find_root().obj or []
    report, groups = audit(
        a,
        b,
        is_self=is_self,
        transcribe=None if transcriber is None else transcriber_of(transcriber),
        repeats=repeats,
        embed=None if artifact is None else _speaker_network(artifact),
        media=media,
        command=shlex.join(["mingc", *words]),
        log=step_logger("audit"),
    )
    show(report, as_json=as_json)
    if html is not None:
        write_page(report, groups, html)
    return FOUND_PROBLEMS if report.is_bad else 0


def _speaker_network(path: Path) -> Embed:
    """The speaker vectors of an artifact. Raises: ConfigError without its network or library."""
    from mingc.artifacts.artifact import open_artifact
    from mingc.audit.sounds import Wave
    from mingc.host.speaker_network import SpeakerNetwork
    from mingc.media.dsp.speaker_features import speaker_features, to_int16

    artifact = open_artifact(path)
    name = artifact.manifest.speaker_network
    if name is None:
        raise ConfigError(
            f"{path} has no speaker network", where="--artifact", fix="name an artifact with voices"
        )
    try:
        network = SpeakerNetwork(artifact.path(name))
    except ImportError as error:
        raise ConfigError(
            "speaker vectors need onnxruntime", where="--artifact", fix="pip install 'mingc[serve]'"
        ) from error

    def embed(samples: Wave, hz: int) -> Wave:
        return network.embed(speaker_features(to_int16(samples), hz))

    return embed
