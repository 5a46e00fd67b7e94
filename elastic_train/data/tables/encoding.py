"""The encoding of text files, which is UTF-8."""

import codecs
from pathlib import Path

from elastic_train.errors import ConfigError


def check_utf8(path: Path) -> None:
    """Raise ConfigError if a file is not UTF-8, with its first such line and how to convert the file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                other = "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "WINDOWS-1252"
                raise ConfigError(
                    f"{path}: line {number} is not UTF-8; a file in {other} is converted with "
                    f"`iconv -f {other} -t UTF-8 {path} > NEW`"
                ) from error
