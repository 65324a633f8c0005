"""The command that signs a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.answers import Answer, command, open_ref
from pipeline.cli.completion import complete_refs

if TYPE_CHECKING:
    from registry.store import Registry

PASSWORD_VARIABLE = "PIPELINE_SIGNING_PASSWORD"


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option(
    "--key", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Private EC key (P-256, P-384, P-521) in PEM format; its password, if it has one, is "
    f"${PASSWORD_VARIABLE}.",
)  # fmt: skip
@click.option(
    "--certificate", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Certificate of that key, in PEM format, for all who trust its root certificate.",
)  # fmt: skip
@click.option(
    "--chain", multiple=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Certificates between that certificate and the root, if any; may be repeated.",
)  # fmt: skip
def sign(
    ref: str, key: Path, certificate: Path | None, chain: tuple[Path, ...], registry: Registry
) -> Answer:
    """Sign every file of REF, a version or ./FOLDER of a bundle.

    It replaces an existing signature. To make a key pair:
    openssl ecparam -name prime256v1 -genkey -noout -out release.key;
    openssl ec -in release.key -pubout -out release.pem
    """
    from registry.trust import sign as sign_bundle

    if chain and certificate is None:
        raise click.UsageError("--chain goes with --certificate")
    password = os.environ.get(PASSWORD_VARIABLE)
    certificates = [] if certificate is None else [certificate, *chain]
    opened = open_ref(ref, registry)
    if opened.version is None:
        public = sign_bundle(opened.bundle, key, password, certificates)
    else:
        public = registry.sign(opened.version, key, password, certificates)
    name = opened.version.ref if opened.version else ref
    return Answer(
        {"digest": opened.bundle.digest, "key": public.fingerprint},
        [f"{name} is signed; the key is {public.fingerprint}"],
    )
