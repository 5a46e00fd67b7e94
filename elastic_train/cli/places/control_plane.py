"""Find the etcd of a command: by a flag, or by the variables that a launcher would read."""

from __future__ import annotations

from elastic_train.errors import translated
from elastic_train.launch.schedulers import Found
from rendezvous.etcd.options import ETCD_KEYS, EtcdOptions, etcd_options


def etcd_of(flag: str | None, found: Found) -> EtcdOptions | None:
    """Return how etcd is reached, with certificates and user from PET_RDZV_CONF; None if nothing names one.

    Raises ConfigError with all that is wrong with these.
    """
    endpoint = flag or found.endpoint
    conf = {name: value for name, value in found.conf.items() if name in ETCD_KEYS}
    with translated():
        return None if endpoint is None else etcd_options(endpoint, conf)
