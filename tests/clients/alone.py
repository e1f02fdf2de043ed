"""Runs a command where there is no network but loopback, as far as this machine allows it.

python -m tests.clients.alone COMMAND ...
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

INSIDE = "--inside"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def main(words: list[str]) -> None:
    if words[0] == INSIDE:
        _raise_loopback()
        os.execvp(words[1], words[1:])
    for unshare in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]) if shutil.which("unshare") else ():  # the second: without root
        inside = [*unshare, sys.executable, "-m", "tests.clients.alone", INSIDE]
        if subprocess.run([*inside, "true"], capture_output=True).returncode == 0:
            os.execvp(inside[0], [*inside, *words])
    print("no network namespace can be made here: the clients could reach the network if they tried", flush=True)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
