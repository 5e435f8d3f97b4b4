"""Bind the address of the server, before torch is imported."""

import errno
import ipaddress
import socket
from contextlib import suppress

from laconic.errors import BusyError, LaconicError, UsageError


class UnprotectedAddressError(LaconicError):
    """Refused for safety: the address can be reached from other machines, and there is no API key."""

    exit_code = 77


def bind_socket(host: str, port: int, api_key: str | None) -> socket.socket:
    """Return a listening socket.

    Raises:
        UnprotectedAddressError: Without a key, if the host is not loopback.
        BusyError: If the port is in use.
        UsageError: If the host is not an address of this machine.
    """
    if api_key is None and not is_local_host(host):
        raise UnprotectedAddressError(
            f"--host {host} can be reached from other machines; give --api-key (or LACONIC_API_KEY), or bind 127.0.0.1"
        )
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # create_server repeats the address
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host}: not an address of this machine: {reason}") from None
        raise BusyError(f"--host {host} --port {port}: {reason}; choose another port") from None
    except UnicodeError:
        raise UsageError(f"--host {host}: not a host name; give an address of this machine") from None


def format_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def is_local_host(host: str) -> bool:
    """Return whether a Host header names this machine: localhost or a loopback address, with or without a port."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").lower()
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
