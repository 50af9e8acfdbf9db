"""`mingc voices`: the voices in the folder of `mingc serve --voices-dir`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import cloup

from mingc.console.command import PATH, TEXT, Command, Group, common, option
from mingc.errors import ConfigError

if TYPE_CHECKING:
    from mingc.runtime.voices import VoiceInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class VoicesReport:
    """The voices of a folder."""

    voices: tuple[VoiceInfo, ...]


@cloup.group(cls=Group)
def command() -> None:
    """List, add and remove the voices that servers keep."""


@command.command("list", cls=Command)
@click.argument("folder", type=PATH)
@common
def list_command(as_json: bool, folder: Path) -> int:
    """Show the voices in FOLDER.

    Needs no artifact.
    """
    from mingc.console.report import show
    from mingc.runtime.service.voice_store import VoiceStore

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", where="mingc voices", fix="name that of --voices-dir")
    show(VoicesReport(voices=tuple(each.info for each in VoiceStore(folder).list())), as_json=as_json)
    return 0


@command.command("add", cls=Command)
@click.argument("artifact", type=PATH)
@click.argument("folder", type=PATH)
@click.argument("recording", type=PATH)
@option("--name", required=True, type=TEXT, help="How requests name the voice.")
@option(
    "--consent", required=True, type=TEXT, help="What the speaker has agreed to, or where that is recorded."
)
@option("--words", required=True, type=TEXT, help="What the recording says.")
@option("--description", type=TEXT, help="What the voice is like.")
@common
def add_command(
    as_json: bool,
    artifact: Path,
    folder: Path,
    recording: Path,
    name: str,
    consent: str,
    words: str,
    description: str | None,
) -> int:
    """Register RECORDING with the engines of ARTIFACT as a voice in FOLDER.

    RECORDING is 1 to 30 s of clear speech. Servers on FOLDER know the voice within a second.
    """
    from mingc.artifacts.artifact import open_artifact
    from mingc.console.report import show
    from mingc.media.decoding import InProcessDecoder
    from mingc.runtime.service.voice_registration import add_voice
    from mingc.runtime.voices import NewVoice, VoiceSample

    try:
        data = recording.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{recording} cannot be read: {error.strerror}",
            where="mingc voices add",
            fix="name a file of sound",
        ) from error
    sample = VoiceSample(recording=data, transcript=words, where="RECORDING")
    voice = NewVoice(name=name, consent=consent, description=description, sample=sample)
    show(add_voice(open_artifact(artifact), folder, voice, InProcessDecoder()), as_json=as_json)
    return 0


@command.command("remove", cls=Command)
@click.argument("folder", type=PATH)
@click.argument("name")
@common
def remove_command(as_json: bool, folder: Path, name: str) -> int:
    """Remove the voice with this name or id from FOLDER."""
    from mingc.console.report import show
    from mingc.runtime.service.voice_store import VoiceStore

    store = VoiceStore(folder) if folder.is_dir() else None
    found = None if store is None else store.find(name)
    if store is None or found is None or not store.remove(found):
        raise ConfigError(
            f"there is no voice {name!r} in {folder}",
            where="mingc voices remove",
            fix="see mingc voices list",
        )
    show(found.info, as_json=as_json)
    return 0
