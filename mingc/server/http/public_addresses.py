"""Which addresses belong to the public internet, by IANA's registries rather than by what this Python knows.

IPv4: all but multicast, the reserved class E, and the blocks of iana-ipv4-special-registry. IPv6: only what
ipv6-unicast-address-assignments lists as allocated to a regional registry, less the blocks of
iana-ipv6-special-registry inside. So every address that embeds an IPv4 one (mapped, compatible, NAT64, 6to4, Teredo) is
refused, and a block that is allocated later is refused until it is added here. Registries as of 2025; the latest of the
IPv6 allocations is 2410::/12 (2024).
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by carriers
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # not in the registry: metadata of Azure's machines
            "169.254.0.0/16",  # link-local
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays, deprecated
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarking
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/3",  # multicast, reserved, broadcast
        ),
    )
)
_ALLOCATED_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001:200::/23", "2001:400::/23", "2001:600::/23", "2001:800::/22", "2001:c00::/23", "2001:e00::/23",
            "2001:1200::/23", "2001:1400::/22", "2001:1800::/23", "2001:1a00::/23", "2001:1c00::/22", "2001:2000::/19",
            "2001:4000::/23", "2001:4200::/23", "2001:4400::/23", "2001:4600::/23", "2001:4800::/23", "2001:4a00::/23",
            "2001:4c00::/23", "2001:5000::/20", "2001:8000::/19", "2001:a000::/20", "2001:b000::/20", "2003::/18",
            "2400::/12", "2410::/12", "2600::/12", "2610::/23", "2620::/23", "2630::/12", "2800::/12", "2a00::/12",
            "2a10::/12", "2c00::/12",
        ),
    )
)  # fmt: skip
_NOT_PUBLIC_V6 = IPv6Network("2001:db8::/32"), IPv6Network("2620:4f:8000::/48")  # documentation, AS112


def is_public(text: str) -> bool:
    """Whether the address `text` is allocated for global unicast and has no special purpose."""
    address = ip_address(text)
    if address.version == 4:
        return not any(address in block for block in _NOT_PUBLIC_V4)
    is_allocated = any(address in block for block in _ALLOCATED_V6)
    return is_allocated and not any(address in block for block in _NOT_PUBLIC_V6)
