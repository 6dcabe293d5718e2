"""What the values of settings may be: checks that say in a sentence what is allowed."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from start_llm.core.modelmap import MOST_NAME, parse_model_map


def _off_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in {"", "off", "none"} else value


OffOr = BeforeValidator(_off_is_none)
_MOST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=_MOST_PORT)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


def _list_of(pattern: str, wanted: str, *, alone: str = "") -> AfterValidator:
    """Names separated by commas, each of which fits the pattern. `alone`: why there may not be just one."""

    def check(value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        for name in names:
            if not re.fullmatch(pattern, name):
                raise ValueError(f"{name[:80]!r} is {wanted}")
        if alone and len(names) == 1:
            raise ValueError(alone)
        return ",".join(names)

    return AfterValidator(check)


HostNames = _list_of(
    r"\*|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?",
    "no host name; give names without scheme and port, e.g. mac.local,llm.lan",
)
ModelNames = _list_of(rf"\S{{1,{MOST_NAME}}}", "no model's name; give names or folders without spaces, e.g. a,b")


def _key(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"(?!\s)[^\x00-\x1f\x7f]*(?<!\s)", value):
        raise ValueError("a key goes into a header: give one without line breaks, and without spaces at its ends")
    return value


def _node_addresses(value: str) -> str:
    """Addresses separated by commas, without a slash at their ends."""
    if "@" in value:  # not shown: it may be a password
        raise ValueError("an address has no user and no password; give scheme, host and port, and NODES_API_KEY")
    addresses = [address.strip().rstrip("/") for address in value.split(",") if address.strip()]
    for address in addresses:
        found = re.fullmatch(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", address)
        if found is None or not 0 < int(found[2] or 1) < 65536 or _is_wrong_number(found[1]):
            raise ValueError(
                f"{address[:80]!r} is no address of a node; give scheme, host and port, "
                "e.g. http://mac-1:8080,http://mac-2:8080"
            )
        if addresses.count(address) > 1:
            raise ValueError(f"{address!r} stands there twice")
    return ",".join(addresses)


def _is_wrong_number(host: str) -> bool:
    """Whether it is written like an IP address, and is none."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return re.fullmatch(r"\[.*|[0-9.]+", host) is not None
    return False


def _event_address(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"tcp://(\*|\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):\d{1,5}", value):
        raise ValueError("give tcp://ADDRESS:PORT, an address of this machine, e.g. tcp://127.0.0.1:5557")
    if value is not None and int(value.rpartition(":")[2]) >= _MOST_PORT:
        raise ValueError(f"the port must be less than {_MOST_PORT}: missed events are asked for at the next one")
    return value


def _model_map(value: str) -> str:
    parse_model_map(value)
    return value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


ModelMapText = AfterValidator(_model_map)
Key = AfterValidator(_key)
NodeAddresses = AfterValidator(_node_addresses)
RankHosts = _list_of(
    r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*",  # "-V" would be a flag of ssh
    "no host; give names or addresses, e.g. mac-1,mac-2",
    alone="one host computes alone; give two or more, this machine first, or none",
)
EventAddress = AfterValidator(_event_address)
Lower = BeforeValidator(lambda value: value.strip().lower() if isinstance(value, str) else value)
Number = BeforeValidator(_number)
NumberOrOff = BeforeValidator(lambda value: _number(_off_is_none(value)))
