"""What remote file systems raise besides OSError: an SDK's own errors, where no answer came (no credentials, no host).

fsspec's file systems translate the answers that they get, and pass everything else through as it is. An error can only
come from a package that has been imported, so nothing is imported to know it.
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
    """Return `others` and the classes of such errors, of the packages that are in use."""
    return *others, *(getattr(sys.modules[module], name) for module, name in _NAMES if module in sys.modules)
