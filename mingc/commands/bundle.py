"""`mingc bundle` and its commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import cloup

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, Group, common, option
from mingc.console.progress import step_logger


def _by_folder(log: Callable[[str], None]) -> Callable[[str], None]:
    """Logs every weights file, which may take minutes, and of other folders, with hundreds of files, the first one."""
    begun: set[str] = set()

    def log_file(path: str) -> None:
        folder, slash, _ = path.partition("/")
        if not slash or folder == "weights":
            log(path)
        elif folder not in begun:
            begun.add(folder)
            log(f"{folder}/")

    return log_file


@cloup.group(cls=Group)
def command() -> None:
    """Look at, pack, sign, unpack and compare artifacts."""


@command.command("inspect", cls=Command)
@click.argument("artifact", type=PATH)
@common
def inspect_command(as_json: bool, artifact: Path) -> int:
    """Show what ARTIFACT contains and was built for.

    Needs no torch.
    """
    from mingc.artifacts.artifact import open_artifact
    from mingc.bundles.inspection import summarize
    from mingc.console.report import show

    show(summarize(open_artifact(artifact)), as_json=as_json)
    return 0


@command.command("pack", cls=Command)
@click.argument("artifact", type=PATH)
@click.argument("output", type=PATH)
@option("--force", is_flag=True, help="Replace a bundle that is already there.")
@option(
    "--with-wheels",
    "wheels",
    type=PATH,
    help="Add the wheels in this folder, for machines and images without a network.",
)
@option(
    "--with-tensorrt",
    "takes_tensorrt",
    is_flag=True,
    help="Let --with-wheels add NVIDIA's TensorRT libraries, which have NVIDIA's licence.",
)
@option("--model-licence", type=PATH, help="Add this file as the licence of the weights.")
@common
def pack_command(
    as_json: bool,
    artifact: Path,
    output: Path,
    force: bool,
    wheels: Path | None,
    takes_tensorrt: bool,
    model_licence: Path | None,
) -> int:
    """Write the folder ARTIFACT to the one file OUTPUT.

    Files are stored uncompressed at multiples of 4,096 bytes, and `mingc serve OUTPUT` maps weights inside the file. A
    start script, a systemd unit, a Containerfile, licences and an SBOM are added below bundle/. To
    continue an interrupted pack, run the same command again.
    """
    from mingc.artifacts.artifact import open_unchecked
    from mingc.bundles.deployment import deployment_files
    from mingc.bundles.packing import pack
    from mingc.console.report import show

    manifest = open_unchecked(artifact).manifest
    extras = deployment_files(manifest, wheels, model_licence, takes_tensorrt=takes_tensorrt)
    report = pack(artifact, output, extras, replace_existing=force, log=_by_folder(step_logger("pack")))
    show(report, as_json=as_json)
    return 0


@command.command("unpack", cls=Command)
@click.argument("bundle", type=PATH)
@click.argument("output", type=PATH)
@option("--force", is_flag=True, help="Replace an artifact that is already there.")
@option(
    "--share/--no-share",
    "is_shared",
    default=True,
    help="Link files of 1 MiB or more to .mingc-files next to OUTPUT, so that equal weights are on disk once.",
)
@common
def unpack_command(as_json: bool, bundle: Path, output: Path, force: bool, is_shared: bool) -> int:
    """Write the files of a packed bundle to a folder.

    Compares the hash of every file of BUNDLE. The folder OUTPUT appears only when it is complete. To continue an
    interrupted unpack, run the same command again.
    """
    from mingc.bundles.unpacking import unpack
    from mingc.console.report import show

    log = _by_folder(step_logger("unpack"))
    report = unpack(bundle, output, replace_existing=force, is_shared=is_shared, log=log)
    show(report, as_json=as_json)
    return 0


@command.command("keygen", cls=Command)
@click.argument("key", type=PATH)
@common
def keygen_command(as_json: bool, key: Path) -> int:
    """Write a new key pair for signatures.

    KEY becomes the secret key, without a password; the public key is next to it: NAME.pub for NAME.key, else KEY.pub.
    Keys of `minisign -G` may be used as well.
    """
    from mingc.bundles.signatures import generate_keys
    from mingc.console.report import show

    show(generate_keys(key), as_json=as_json)
    return 0


@command.command("sign", cls=Command)
@click.argument("bundle", type=PATH)
@option(
    "--secret-key",
    type=PATH,
    required=True,
    help="Secret key in minisign's format; MINGC_SIGN_PASSWORD has its password, if it has one.",
)
@option(
    "--comment", show_default="model and version", help="Line that the signature covers, such as a version."
)
@common
def sign_command(as_json: bool, bundle: Path, secret_key: Path, comment: str | None) -> int:
    """Sign BUNDLE, packed or unpacked.

    The signature is Ed25519 in minisign's format over bundle.json, which has all hashes.
    """
    from mingc.bundles.signatures import sign_bundle
    from mingc.console.report import show

    show(sign_bundle(bundle, secret_key, comment), as_json=as_json)
    return 0


@command.command("verify-signature", cls=Command)
@click.argument("bundle", type=PATH)
@option("--public-key", required=True, help="Public key: a file, or the line that minisign prints.")
@common
def verify_signature_command(as_json: bool, bundle: Path, public_key: str) -> int:
    """Check the signature and all hashes of BUNDLE.

    BUNDLE may be packed or unpacked. Needs no torch.
    """
    from mingc.bundles.signatures import verify_signature
    from mingc.console.report import show

    show(verify_signature(bundle, public_key), as_json=as_json)
    return 0


@command.command("diff", cls=Command)
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@common
def diff_command(as_json: bool, first: Path, second: Path) -> int:
    """Show the differences of two artifacts or bundles.

    These are settings, files, and the bytes that an upgrade must transfer. Exits with 3 when
    something differs. Reads manifests only.
    """
    from mingc.bundles.comparison import diff
    from mingc.console.report import show

    report = diff(first, second)
    show(report, as_json=as_json)
    return 0 if report.is_same else FOUND_PROBLEMS


@command.command("prune", cls=Command)
@click.argument("folder", type=PATH)
@option("--dry-run", "is_dry", is_flag=True, help="Show what would be removed.")
@option(
    "--cache", "has_cache", is_flag=True, help="Also remove the copies that servers of packed bundles made."
)
@common
def prune_command(as_json: bool, folder: Path, is_dry: bool, has_cache: bool) -> int:
    """Remove what no bundle in FOLDER uses.

    These are stored files, and leftovers of interrupted packs and unpacks.
    """
    from mingc.bundles.pruning import prune
    from mingc.console.report import show

    show(prune(folder, is_dry=is_dry, has_cache=has_cache), as_json=as_json)
    return 0
