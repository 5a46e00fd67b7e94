"""What --rdzv_conf says, checked before anything is connected: every problem at once."""

from __future__ import annotations

import math

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous.errors import OptionError
from rendezvous.options import ETCD_KEYS, EtcdOptions, etcd_options, unknown_keys

BACKEND = "etcd"
# `timeout` is the launcher's own key: it always passes one, 900 s unless told otherwise.
SECONDS = {"ttl": "ttl_s", "last_call_s": "last_call_s", "timeout": "timeout_s", "stop_grace_s": "stop_grace_s"}
CONF_KEYS = (*SECONDS, "recovery", "standby", *ETCD_KEYS)


class Conf:
    """What --rdzv_conf says, checked: every problem at once."""

    def __init__(self) -> None:
        self.ttl_s = 3.0
        self.last_call_s = 2.0
        self.timeout_s = 900.0
        self.stop_grace_s = 3.0
        self.is_live = False
        self.has_standby = True
        self.etcd = EtcdOptions(("unset",))

    @classmethod
    def read(cls, params: RendezvousParameters) -> Conf:
        conf, problems = cls(), unknown_keys(params.config, CONF_KEYS)
        for key, name in SECONDS.items():
            given = params.get(key, getattr(conf, name))
            try:
                seconds = float(given)
            except ValueError:
                seconds = math.nan
            if 0 <= seconds < math.inf:
                setattr(conf, name, seconds)
            else:
                problems.append(f"--rdzv_conf: {key}={given!r} is not a number of seconds, 0 or more")
        recovery = str(params.get("recovery", "restart"))
        conf.is_live = recovery == "live"
        if recovery not in ("restart", "live"):
            problems.append(f"--rdzv_conf: recovery={recovery!r} is neither 'restart' nor 'live'")
        standby = str(params.get("standby", "1"))
        conf.has_standby = standby == "1"
        if standby not in ("0", "1"):
            problems.append(f"--rdzv_conf: standby={standby!r} is neither 0 nor 1")
        try:
            conf.etcd = etcd_options(params.endpoint, params.config)
        except OptionError as error:
            problems += error.problems
        if problems:
            raise OptionError(*problems)
        return conf
