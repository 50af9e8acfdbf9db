"""An audit from its arguments to its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mingc.audit.comparison import judge
from mingc.audit.measures import Embed, Measured
from mingc.audit.report import AuditReport, SoundRow
from mingc.audit.self_audit import Collected, Speaking, collect, heard, judge_servers
from mingc.audit.server import Transcribe, is_url, served, transcribed_by
from mingc.audit.sounds import Sound, read_group
from mingc.errors import ConfigError

Log = Callable[[str], None]
Groups = Mapping[str, Sequence[Measured]]


def audit(
    a: str,
    b: str | None,
    *,
    is_self: bool,
    transcribe: Transcribe | None,
    repeats: int,
    embed: Embed | None,
    media: Path | None,
    command: str,
    log: Log,
) -> tuple[AuditReport, Groups]:
    """Compare `a` and `b`, or ask `a` (beside `b`) what is known. Returns the report and all sounds by group.

    Two servers are asked one after the other, so that two artifacts may use the same GPU.
    """
    targets = {"A": a} | ({} if b is None else {"B": b})
    kinds = {is_server(each) for each in targets.values()}
    if is_self and kinds != {True}:
        raise ConfigError(
            "only servers and artifacts can be asked", where="--self", fix="name the URL of a server"
        )
    if len(kinds) > 1:
        raise ConfigError(
            "one is a server, the other is not", where="mingc audit", fix="compare two servers, or sounds with sounds"
        )  # fmt: skip
    servers: list[Collected] = []
    if kinds == {True}:
        for label, target in targets.items():
            with served(target) as server:
                servers.append(Collected(name=label, sample_rate=server.entry.get("sample_rate") or None))
                heard_by = transcribe or transcribed_by(server)
                speaking = Speaking(
                    server=server, found=servers[-1], transcribe=heard_by, embed=embed, log=log
                )
                if is_self:
                    collect(speaking, repeats=repeats, media=media)
                else:
                    speaking.sentences([None], repeats)
        groups = {each.name: each.sounds for each in servers}
    else:
        groups = _files(targets, transcribe, embed, log)
    named = tuple(f"{label}: {each}" for label, each in targets.items())
    if is_self:
        judged = judge_servers(servers)
    else:
        problems = [problem for each in servers for problem in each.problems]
        for label, sounds in groups.items():
            if not sounds:
                raise ConfigError(
                    f"{label} has no sound: {problems[0].found if problems else 'nothing was spoken'}",
                    where=targets[label],
                    fix="name a server that speaks",
                )
        judged = judge(*groups.values())
        judged = replace(judged, checks=(*judged.checks, *problems))
    report = AuditReport(
        verdict=judged.verdict,
        reasons=judged.reasons,
        notes=judged.notes,
        groups=named,
        figures=judged.figures,
        checks=judged.checks,
        sounds=tuple(
            SoundRow(
                name=each.sound.name,
                group=label,
                text=each.sound.text,
                transcript=each.transcript,
                figures=each.figures,
            )
            for label, group in groups.items()
            for each in group
        ),
        command=command,
    )
    return report, groups


def is_server(target: str) -> bool:
    """Whether it is a URL, or an artifact, which is served: its folder, or one file."""
    path = Path(target)
    return is_url(target) or (path / "manifest.json").is_file() or path.suffix == ".mingc"


def _files(
    targets: Mapping[str, str], hear: Transcribe | None, embed: Embed | None, log: Log
) -> dict[str, list[Measured]]:
    """Read both groups. A text beside a file of one group holds for the same utterance of the other."""
    groups: dict[str, Sequence[Sound]] = {}
    for label, target in targets.items():
        groups[label] = read_group(Path(target))
        log(f"{label}: {len(groups[label])} sounds of {target}")
    if any(
        Path(each).is_file() for each in targets.values()
    ):  # single files are compared whatever their names
        groups = {label: [replace(each, utterance="") for each in group] for label, group in groups.items()}
    texts = {each.utterance: each.text for group in groups.values() for each in group if each.text}
    return {
        label: [
            heard(
                Measured(sound=replace(each, text=each.text or texts.get(each.utterance, "")), embed=embed),
                hear,
            )
            for each in group
        ]
        for label, group in groups.items()
    }
