"""Errors of remote file systems other than OSError: an SDK got no answer (no credentials, no host).

fsspec's file systems translate answers and pass other errors on. Only an imported package can raise its errors, so
nothing is imported here.
"""

from __future__ import annotations

import sys

_NAMES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
)


def sdk_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return `others` and the SDK error classes of the packages in use."""
    return *others, *(getattr(sys.modules[module], name) for module, name in _NAMES if module in sys.modules)
